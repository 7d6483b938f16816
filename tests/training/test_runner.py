"""A program for a single process trains on two ranks with `python -m estimator_ext`."""

from __future__ import annotations

from pathlib import Path

from runner import check_like_one_process


def test_two_ranks_train_like_one_process(tmp_path: Path) -> None:
    check_like_one_process(tmp_path, "gradients")
