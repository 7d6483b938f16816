"""The minimal example: two ranks train it, and it resumes as a single process."""

from __future__ import annotations

import re
from pathlib import Path

from harness import ROOT, run_python

MAIN = ROOT / "examples" / "minimal" / "main.py"


def last_step_and_accuracy(*arguments: object, ranks: int = 0) -> tuple[int, float]:
    """Runs the example, which prints a single line, and parses that line."""
    out = run_python(MAIN, *arguments, ranks=ranks, limit_s=60).stdout
    prefix = r"\[chief:0\] " if ranks else ""
    line = re.fullmatch(rf"{prefix}step (\d+): accuracy (\d\.\d+)\n", out)
    assert line is not None, out
    return int(line[1]), float(line[2])


def test_two_ranks_train_and_one_process_resumes(tmp_path: Path) -> None:
    step, accuracy = last_step_and_accuracy("--model-dir", tmp_path, ranks=2)
    assert step == 200
    assert accuracy > 0.9

    step, accuracy = last_step_and_accuracy("--model-dir", tmp_path, "--steps", 240)
    assert step == 240
    assert accuracy > 0.9
