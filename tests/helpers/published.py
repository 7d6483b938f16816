"""Runs unmodified programs from PyPI, alone and on two ranks, and compares their variables."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from harness import PROGRAMS, QUIET, ROOT

LIMIT_S = 600.0
SAVES_VARIABLES = str(PROGRAMS / "saves_variables.py")

Variables = dict[str, np.ndarray]


def run(
    directory: Path,
    size: int,
    program: Sequence[str],
    options: Sequence[str] = (),
    is_cluster: bool | None = None,
    code: int = 0,
) -> subprocess.CompletedProcess[str]:
    """Runs a program with `python -m estimator_ext`, and saves the variables of each rank.

    Args:
      directory: working directory of the program, and directory of the saved variables.
      size: number of ranks.
      program: a script, or "-m" and a module, with its arguments.
      options: options of `python -m estimator_ext`.
      is_cluster: runs the program under the launcher; None does so for several ranks.
      code: exit code that it must have.

    Returns:
      The completed process, with the output of all ranks.
    """
    directory.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable, "-m", "hostopt", "run", "-np", str(size), "--verbose", "--"]
    if not (size > 1 if is_cluster is None else is_cluster):
        launcher = []
    runner = [sys.executable, "-m", "estimator_ext", *options, SAVES_VARIABLES]
    path = [str(ROOT), str(PROGRAMS), *filter(None, [os.environ.get("PYTHONPATH")])]
    ran = subprocess.run(
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
    assert ran.returncode == code, ran.stdout[-6000:]
    return ran


def copy_first_checkpoints(source: Path, target: Path) -> None:
    """Makes trainings start with the random initial values of earlier ones.

    Args:
      source: directory of one or more completed trainings.
      target: directory of the next trainings.
    """
    for path in source.rglob("model.ckpt-0.*"):
        directory = target / path.parent.relative_to(source)
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, directory)
        (directory / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-0"\n')


def trained(directory: Path, rank: int) -> Variables:
    """Reads the trainable variables of a rank, as they were after the last training of each model.

    Args:
      directory: directory of `run`.
      rank: rank of the process.

    Returns:
      Variables by "model: name". The model is the last component of its model_dir.
    """
    ending = f".rank-{rank}.npz"
    return {
        f"{path.name[: -len(ending)]}: {name}": value
        for path in directory.glob(f"*{ending}")
        for name, value in np.load(path).items()
    }


def check_ranks_equal(directory: Path) -> None:
    """Checks that two ranks have trained and hold the same bits."""
    first, second = trained(directory, 0), trained(directory, 1)
    assert first and set(first) == set(second)
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value, err_msg=name)


def check_equals_single(
    directory: Path, alone: Path, tolerance: float = 1e-5, noise: re.Pattern[str] | None = None
) -> None:
    """Checks that two ranks on half batches train the variables of one process on whole batches.

    Args:
      directory: directory of `run` with two ranks.
      alone: directory of `run` with one rank.
      tolerance: relative and absolute.
      noise: names of variables whose gradients are zero except for rounding errors, which Adam
        scales to full steps. They must stay small.
    """
    actual, expected = trained(directory, 0), trained(alone, 0)
    assert expected and set(actual) == set(expected)
    for name, value in expected.items():
        if noise is not None and noise.search(name):
            assert np.abs([actual[name], value]).max() < 1e-3, name
            continue
        np.testing.assert_allclose(
            actual[name], value, rtol=tolerance, atol=tolerance, err_msg=name
        )
