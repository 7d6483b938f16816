"""Runs programs from PyPI as they ship, alone and on two ranks, and reads what they trained."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from launcher import ROOT
from ranks import PROGRAMS, QUIET

LIMIT_S = 600.0
SAVES_VARIABLES = str(PROGRAMS / "saves_variables.py")

Variables = dict[str, np.ndarray]


def run(
    directory: Path,
    size: int,
    program: Sequence[str],
    options: Sequence[str] = (),
    is_cluster: bool | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program with `python -m estimator_ext`, and keep the variables of each rank.

    Args:
      directory: where the ranks' variables go; the working directory of the program.
      size: number of ranks.
      program: a script, or "-m" and a module, with its arguments.
      options: of `python -m estimator_ext`.
      is_cluster: whether the processes belong to one; by default several of them do.

    Returns:
      The processes that ended, with their output.
    """
    directory.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable, "-m", "hostopt.cli", "run", "-np", str(size), "--"]
    if not (size > 1 if is_cluster is None else is_cluster):
        launcher = []
    runner = [sys.executable, "-m", "estimator_ext", *options, SAVES_VARIABLES]
    path = [str(ROOT), str(PROGRAMS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [*launcher, *runner, *program],
        check=False,
        env={
            **os.environ,
            **QUIET,
            "PYTHONPATH": os.pathsep.join(path),
            "SAVE_VARIABLES_TO": str(directory),
        },
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )


def pass_on_first_checkpoints(source: Path, target: Path) -> None:
    """Have a training begin with what another one began with: initial values are random.

    Args:
      source: directory of a training that has ended, or of several.
      target: the same of trainings that are to come.
    """
    for path in source.rglob("model.ckpt-0.*"):
        directory = target / path.parent.relative_to(source)
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, directory)
        (directory / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-0"\n')


def trained(directory: Path, rank: int) -> Variables:
    """The trainable variables of a rank, each after its model's last training.

    Args:
      directory: that of `run`.
      rank: of the process.

    Returns:
      The variables by model, which is the last part of its model_dir, and name.
    """
    ending = f".rank-{rank}.npz"
    return {
        f"{path.name[: -len(ending)]}: {name}": value
        for path in directory.glob(f"*{ending}")
        for name, value in np.load(path).items()
    }


def check_alike(directory: Path) -> None:
    """Two ranks hold the same bits, and have trained."""
    first, second = trained(directory, 0), trained(directory, 1)
    assert first and set(first) == set(second)
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value, err_msg=name)


def check_equal(
    directory: Path, alone: Path, tolerance: float = 1e-5, noise: re.Pattern[str] | None = None
) -> None:
    """Two ranks on half batches hold what one process holds after the whole batches.

    Args:
      directory: that of `run` with two ranks.
      alone: that of `run` with one.
      tolerance: relative and absolute.
      noise: names of variables whose gradient is zero but for rounding, of which an optimizer such
        as Adam makes whole steps; they stay small.
    """
    found, wanted = trained(directory, 0), trained(alone, 0)
    assert wanted and set(found) == set(wanted)
    for name, value in wanted.items():
        if noise is not None and noise.search(name):
            assert np.abs([found[name], value]).max() < 1e-3, name
            continue
        np.testing.assert_allclose(
            found[name], value, rtol=tolerance, atol=tolerance, err_msg=name
        )
