"""Two ranks of which the second gets a signal or is stuck."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ranks import Rank, Ranks

SETTINGS = {"optimizers": ["adam"], "steps": 20, "checkpoint_steps": 1000}


LATE = 100_000  # a step that no test reaches


def settings(directory: Path, **chosen: Any) -> list[str]:
    return [json.dumps({**SETTINGS, "model_dir": str(directory / "model"), **chosen})]


def saved_steps(directory: Path) -> list[int]:
    model = directory / "model" / "adam"
    return sorted(int(p.stem.rpartition("-")[2]) for p in model.glob("model.ckpt-*.index"))


def start(
    ranks: Ranks, directory: Path, addresses: list[str], fault: dict[str, Any], **chosen: Any
) -> list[Rank]:
    """Starts two ranks; the second has a fault."""
    return ranks.start(
        "train_with_fault.py",
        {"chief": addresses[:1], "worker": addresses[1:]},
        arguments=settings(directory, **chosen),
        task_arguments={"worker:0": [json.dumps({"fault": fault})]},
    )
