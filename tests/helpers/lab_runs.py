"""Runs of the labs, and what they print."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from harness import ROOT
from ranks import Ranks

ALONE, SHARDED, BROADCAST, DISTRIBUTED = range(4)


EXAMPLES = ROOT / "examples"


def run(ranks: Ranks, lab: str, size: int, *arguments: object) -> list[str]:
    """Runs main.py of a lab; returns the output of each rank."""
    main = str(EXAMPLES / lab / "main.py")
    return [rank.output for rank in ranks.run(main, size, arguments=[*map(str, arguments)])]


def assert_is_picture(file: Path) -> None:
    assert file.read_bytes().startswith(b"\x89PNG")


def assert_ways_send_less_and_less(directory: Path, steps: int, every: int) -> None:
    """Checks the numbers of main.py, which trains with 2 workers."""
    runs = json.loads((directory / "runs.json").read_text())
    assert [*runs] == ["every step", "averaging", "DiLoCo", "DiLoCo, int8"]
    sent_mb = {name: run["sent_mb"] for name, run in runs.items()}
    # the averages of Adam are sent, too
    assert sent_mb["averaging"] == pytest.approx(3 * sent_mb["every step"] / every, rel=0.02)
    assert sent_mb["every step"] > sent_mb["averaging"] > sent_mb["DiLoCo"]
    assert sent_mb["DiLoCo"] > sent_mb["DiLoCo, int8"]
    for run in runs.values():
        assert len(run["loss"]) == len(run["seconds"]) == steps
        assert np.mean(run["loss"][-5:]) < np.mean(run["loss"][:5])
    assert_is_picture(directory / "runs.png")
