"""The labs in examples: real processes train them, and the numbers they report are checked."""

from __future__ import annotations

from pathlib import Path

from harness import run_python
from lab_runs import (
    EXAMPLES,
    assert_ways_send_less_and_less,
)

# --- a slow link ---------------------------------------------------------------------------------


def test_slow_link_trains_between_two_namespaces(tmp_path: Path) -> None:
    arguments = ["--output", tmp_path, "--steps", 30, "--every", 10, "--hidden", 16]
    output = run_python(
        EXAMPLES / "slow_link" / "link.py", "--mbit", 100, *arguments, MPLBACKEND="Agg"
    ).stdout
    assert "DiLoCo, int8: " in output
    assert_ways_send_less_and_less(tmp_path, 30, 10)
