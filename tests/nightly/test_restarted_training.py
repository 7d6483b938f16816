"""Trainings that `hostopt run` restarts after a rank was killed."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import PROGRAMS, QUIET
from launcher import Launcher
from ranks import Ranks
from restarted import arguments, final, run


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
    launcher.ended(
        *("-np", "2", "--evaluators", "1", "--log-dir", str(tmp_path / "logs"), "--"),
        *(sys.executable, str(PROGRAMS / "train.py"), json.dumps({"runs": [run]})),
        limit_s=150,
        **QUIET,
    )
    assert (tmp_path / "logs" / "evaluator-0.attempt-1.log").exists()
