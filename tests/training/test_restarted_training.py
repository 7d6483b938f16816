"""Trainings that `hostopt run` restarts after a rank was killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from launcher import Launcher
from ranks import Ranks
from restarted import arguments, final, run


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
