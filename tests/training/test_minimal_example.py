"""The minimal example: two ranks train it, and it resumes as a single process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from harness import QUIET, ROOT, deadline_s

MAIN = str(ROOT / "examples" / "minimal" / "main.py")
RUN = [sys.executable, "-m", "hostopt.cli", "run", "-np", "2", "--"]


def last_step_and_accuracy(command: list[str], prefix: str = "") -> tuple[int, float]:
    """Runs the example, which prints a single line, and parses that line."""
    env = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}
    limit_s = deadline_s(60)
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=limit_s, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = re.fullmatch(rf"{re.escape(prefix)}step (\d+): accuracy (\d\.\d+)\n", done.stdout)
    assert line is not None, done.stdout
    return int(line[1]), float(line[2])


def test_two_ranks_train_and_one_process_resumes(tmp_path: Path) -> None:
    program = [sys.executable, MAIN, "--model-dir", str(tmp_path / "model")]
    step, accuracy = last_step_and_accuracy([*RUN, *program], "[chief:0] ")
    assert step == 200
    assert accuracy > 0.9

    step, accuracy = last_step_and_accuracy([*program, "--steps", "240"])
    assert step == 240
    assert accuracy > 0.9
