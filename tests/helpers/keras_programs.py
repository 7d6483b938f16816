"""Programs for Keras, on one rank or several that `hostopt run` starts."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

from harness import QUIET, ROOT, deadline_s

HAS_KERAS_3 = not importlib.metadata.version("keras").startswith("2.")


def python(*arguments: str, ranks: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs Python, or that many ranks of it."""
    command = [sys.executable, *arguments]
    if ranks:
        command = [sys.executable, "-m", "hostopt.cli", "run", "-np", str(ranks), "--", *command]
    env = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT), **environ}
    limit_s = deadline_s(200)
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=limit_s, env=env
    )
