"""Runs `python -m estimator_ext` on programs for a single process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import tensorflow as tf
from harness import PROGRAMS, QUIET, ROOT, deadline_s

PROGRAM = str(PROGRAMS / "unedited.py")


def run(
    size: int,
    *arguments: str,
    directory: Path | None = None,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "estimator_ext", *arguments]
    if size > 1:
        command = [sys.executable, "-m", "hostopt.cli", "run", "-np", str(size), "--", *command]
    return subprocess.run(
        command,
        check=False,
        env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT), **environ},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=deadline_s(150),
    )


def check_like_one_process(directory: Path, kind: str) -> None:
    """Checks that two ranks train a kind of model as one process does."""
    trained = []
    for size in (1, 2):
        # a TPUEstimator has a global batch size
        batch_size = 16 if kind == "tpu" else 16 // size
        model_dir = str(directory / str(size))
        options = ["--model-dir", model_dir, "--batch-size", str(batch_size), "--kind", kind]
        ran = run(size, PROGRAM, *options)
        assert ran.returncode == 0, ran.stderr
        assert tf.train.load_variable(model_dir, "global_step") == 6
        name = "linear/linear_model/x/weights" if kind.startswith("canned") else "w"
        trained.append(tf.train.load_variable(model_dir, name))
    np.testing.assert_allclose(trained[0], trained[1], rtol=1e-5, atol=1e-7)
    assert np.abs(trained[0]).max() > 0.1
