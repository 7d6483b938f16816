"""Runs of tests/programs/train.py, and what they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from harness import reserved_addresses
from ranks import Rank, Ranks
from summaries import summaries


def settings(tmp_path: Path, **chosen: Any) -> list[str]:
    directories = {"model_dir": str(tmp_path / "model"), "dump_dir": str(tmp_path)}
    return [json.dumps({**directories, **chosen})]


def final(tmp_path: Path, rank: int = 0, optimizer: str = "adam") -> dict[str, np.ndarray]:
    return dict(np.load(tmp_path / f"{optimizer}-{rank}.npz"))


def evaluated_steps(eval_dir: Path, tag: str = "acc") -> list[int]:
    """Returns the steps for which an evaluation wrote an accuracy, once for each writer."""
    return [step for step, _, _ in summaries(eval_dir, tag)]


def with_an_evaluator(tmp_path: Path, ranks: Ranks, chosen: dict[str, Any]) -> list[Rank]:
    """Runs chief, worker and evaluator, which must succeed."""
    with reserved_addresses(2) as (chief, worker):
        jobs = {"chief": [chief], "worker": [worker]}
        started = ranks.start(
            "train.py", jobs, evaluators=1, arguments=settings(tmp_path, **chosen)
        )
        for rank in started:
            assert rank.wait() == 0, rank.output
    return started
