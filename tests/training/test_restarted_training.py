"""Trainings that `hostopt run` restarts after a rank was killed."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from harness import PROGRAMS, QUIET
from launcher import Launcher
from ranks import Ranks

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
    """Returns all variables after the last step."""
    reader = tf.train.load_checkpoint(str(directory / "adam" / f"model.ckpt-{STEPS}"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def run(launcher: Launcher, directory: Path, *options: str, slot: int, **chosen: Any) -> str:
    """Trains under the launcher; a slot is killed in the fourth step of each attempt."""
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


def test_a_training_restarted_twice_equals_an_uninterrupted_one(
    launcher: Launcher, ranks: Ranks, tmp_path: Path
) -> None:
    chosen = {"shuffled": True}
    restarts = ("-np", "2", "--max-restarts", "2")
    errors = run(launcher, tmp_path / "broken", *restarts, slot=0, **chosen)
    assert errors.count("SIGKILL") >= 2
    ranks.run("train_with_fault.py", 2, arguments=[arguments(tmp_path / "whole", **chosen)])
    result, expected = final(tmp_path / "broken"), final(tmp_path / "whole")
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(result[name], value, err_msg=name)


def test_fewer_ranks_train_like_one_worker_on_the_whole_batch(
    launcher: Launcher, ranks: Ranks, tmp_path: Path
) -> None:
    elastic = ("-np", "3", "--min-np", "2", "--max-restarts", "2")
    errors = run(launcher, tmp_path / "elastic", *elastic, slot=2)
    assert "model.ckpt-6 was saved by 3 ranks, and now there are 2" in errors
    # the same steps by one worker, which starts with the checkpoint of three ranks
    alone = tmp_path / "alone" / "adam"
    alone.mkdir(parents=True)
    for file in (tmp_path / "elastic" / "adam").glob("model.ckpt-6.*"):
        shutil.copy(file, alone)
    (alone / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-6"\n')
    ranks.run("train_with_fault.py", 1, arguments=[arguments(tmp_path / "alone")])
    result, expected = final(tmp_path / "elastic"), final(tmp_path / "alone")
    for name, value in expected.items():
        np.testing.assert_allclose(result[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(("place", "at"), [("model_fn", 1), ("hook", 3)])
def test_an_evaluator_ends_with_ranks_that_exit_with_0(
    launcher: Launcher, tmp_path: Path, place: str, at: int
) -> None:
    """The ranks exit before or in training, without the marker of its end; the launcher knows."""
    early_exit = {"raise_in": place, "raise_at": at, "raise_kind": "sys.exit(0)"}
    rank_settings = {str(rank): early_exit for rank in range(2)}
    run = {**json.loads(arguments(tmp_path, api="ours")), "rank_settings": rank_settings}
    process = launcher.run(
        *("-np", "2", "--evaluators", "1", "--log-dir", str(tmp_path / "logs"), "--"),
        *(sys.executable, str(PROGRAMS / "train.py"), json.dumps({"runs": [run]})),
        **QUIET,
    )
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    assert (tmp_path / "logs" / "evaluator-0.attempt-1.log").exists()
