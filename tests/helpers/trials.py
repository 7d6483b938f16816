"""Measured trials of options, and the command that makes them."""

from __future__ import annotations

import os
import subprocess
import sys

from harness import ROOT, deadline_s

from hostopt.options import MIB
from hostopt.tuning import Trial

SIZES = (MIB // 2, MIB, 2 * MIB)


def trial(communication: str, *seconds: float) -> Trial:
    return Trial(communication, MIB, SIZES[: len(seconds)], seconds)


def hostopt(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command, which must succeed."""
    return subprocess.run(
        [sys.executable, "-m", "hostopt.cli", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=deadline_s(300),
        check=True,
    )
