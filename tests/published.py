"""Runs programs from PyPI as they ship, alone and on two ranks, and reads what they trained."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from launcher import ROOT
from ranks import PROGRAMS, QUIET

LIMIT_S = 300.0
SAVES_VARIABLES = str(PROGRAMS / "saves_variables.py")

Variables = dict[str, np.ndarray]


def run(
    directory: Path, size: int, program: Sequence[str], options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a program with `python -m estimator_ext`, and keep the variables of each rank.

    Args:
      directory: where the ranks' variables go; the working directory of the program.
      size: number of ranks; 1 is a cluster of one rank.
      program: a script, or "-m" and a module, with its arguments.
      options: of `python -m estimator_ext`.

    Returns:
      The processes that ended, with their output.
    """
    directory.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable, "-m", "hostopt.cli", "run", "-np", str(size), "--"]
    runner = [sys.executable, "-m", "estimator_ext", *options, SAVES_VARIABLES]
    path = os.pathsep.join([str(ROOT), str(PROGRAMS)])
    return subprocess.run(
        [*launcher, *runner, *program],
        check=False,
        env={**os.environ, **QUIET, "PYTHONPATH": path, "SAVE_VARIABLES_TO": str(directory)},
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )


def trained(directory: Path, rank: int) -> Variables:
    """The trainable variables of a rank after its last training, by name."""
    return dict(np.load(directory / f"rank-{rank}.npz"))


def check_alike(directory: Path) -> None:
    """Two ranks hold the same bits, and have trained."""
    first, second = trained(directory, 0), trained(directory, 1)
    assert first and set(first) == set(second)
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value, err_msg=name)


def check_equal(directory: Path, alone: Path, tolerance: float = 1e-5) -> None:
    """Two ranks on half batches hold what one process holds after the whole batches."""
    found, wanted = trained(directory, 0), trained(alone, 0)
    assert wanted and set(found) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(
            found[name], value, rtol=tolerance, atol=tolerance, err_msg=name
        )
