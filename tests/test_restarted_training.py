"""Trainings that `hostopt run` starts again after a rank has died."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from launcher import Launcher
from ranks import PROGRAMS, QUIET, Ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.faults, pytest.mark.timeout(180)]

STEPS = 9
SETTINGS = {
    "optimizers": ["adam"],
    "steps": STEPS,
    "checkpoint_steps": 1,
    "bucket_mb": 2**-12,
    "collective_timeout_s": 30.0,
}


def arguments(directory: Path, **chosen: Any) -> str:
    return json.dumps({**SETTINGS, "model_dir": str(directory), **chosen})


def final(directory: Path) -> dict[str, np.ndarray]:
    """All variables after the last step."""
    reader = tf.train.load_checkpoint(str(directory / "adam" / f"model.ckpt-{STEPS}"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def run(launcher: Launcher, directory: Path, *options: str, slot: int, **chosen: Any) -> str:
    """Train under the launcher, where a slot is killed in the fourth step of each of its lives."""
    fault = {"point": "between-updates", "step": 3, "action": "kill", "slot": slot}
    process = launcher.run(
        *options,
        "--",
        sys.executable,
        str(PROGRAMS / "train_with_fault.py"),
        arguments(directory, fault=fault, **chosen),
        **QUIET,
    )
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    return errors


def test_a_training_that_was_started_again_twice_ends_like_one_that_ran_through(
    launcher: Launcher, ranks: Ranks, tmp_path: Path
) -> None:
    chosen = {"shuffled": True}
    restarts = ("-np", "2", "--max-restarts", "2")
    errors = run(launcher, tmp_path / "broken", *restarts, slot=0, **chosen)
    assert errors.count("SIGKILL") >= 2
    ranks.run("train_with_fault.py", 2, arguments=[arguments(tmp_path / "whole", **chosen)])
    found, wanted = final(tmp_path / "broken"), final(tmp_path / "whole")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_ring_with_fewer_ranks_trains_as_one_worker_on_the_whole_batch(
    launcher: Launcher, ranks: Ranks, tmp_path: Path
) -> None:
    elastic = ("-np", "3", "--min-np", "2", "--max-restarts", "2")
    errors = run(launcher, tmp_path / "elastic", *elastic, slot=2)
    assert "model.ckpt-6 was saved by 3 ranks, and now there are 2" in errors
    # the same steps by one worker, which begins with the checkpoint that three have made
    alone = tmp_path / "alone" / "adam"
    alone.mkdir(parents=True)
    for file in (tmp_path / "elastic" / "adam").glob("model.ckpt-6.*"):
        shutil.copy(file, alone)
    (alone / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-6"\n')
    ranks.run("train_with_fault.py", 1, arguments=[arguments(tmp_path / "alone")])
    found, wanted = final(tmp_path / "elastic"), final(tmp_path / "alone")
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(("place", "at"), [("model_fn", 1), ("hook", 3)])
def test_an_evaluator_ends_with_ranks_that_exit_with_0(
    launcher: Launcher, tmp_path: Path, place: str, at: int
) -> None:
    """Before and in training: nobody writes that it has ended, and the launcher knows."""
    leaves = {"raise_in": place, "raise_at": at, "raise_kind": "sys.exit(0)"}
    own = {str(rank): leaves for rank in range(2)}
    run = {**json.loads(arguments(tmp_path, api="ours")), "own": own}
    process = launcher.run(
        *("-np", "2", "--evaluators", "1", "--", sys.executable, str(PROGRAMS / "train.py")),
        json.dumps({"runs": [run]}),
        **QUIET,
    )
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    assert "[evaluator:0]" in errors
