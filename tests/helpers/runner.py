"""Runs `python -m estimator_ext` on programs for a single process."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from harness import PROGRAMS, run_python

PROGRAM = str(PROGRAMS / "unedited.py")


def run(size: int, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program on that many ranks; `options` are those of `run_python`."""
    return run_python("-m", "estimator_ext", *arguments, ranks=size if size > 1 else 0, **options)


def horovod_data(directory: Path) -> Path:
    """Makes a directory with the data of tests/programs/hvd_*.py and sdp_tape.py."""
    directory.mkdir()
    random = np.random.default_rng(0)
    images = random.random((1280, 784), np.float32)
    np.savez(directory / "data.npz", x=images, y=random.integers(0, 10, 1280))
    return directory


def horovod_weights(directory: Path, size: int) -> list[dict[str, Any]]:
    """Returns the weights that each rank of such a program has written."""
    return [dict(np.load(directory / f"weights-{rank}.npz")) for rank in range(size)]


def check_like_one_process(directory: Path, kind: str) -> None:
    """Checks that two ranks train a kind of model as one process does."""
    trained, names = [], []
    for size in (1, 2):
        # a TPUEstimator has a global batch size
        batch_size = 16 if kind == "tpu" else 16 // size
        model_dir = str(directory / str(size))
        options = ["--model-dir", model_dir, "--batch-size", str(batch_size), "--kind", kind]
        run(size, PROGRAM, *options)
        assert tf.train.load_variable(model_dir, "global_step") == 6
        name = "linear/linear_model/x/weights" if kind.startswith("canned") else "w"
        trained.append(tf.train.load_variable(model_dir, name))
        names.append(tf.train.list_variables(model_dir))
    assert names[0] == names[1]
    np.testing.assert_allclose(trained[0], trained[1], rtol=1e-5, atol=1e-7)
    assert np.abs(trained[0]).max() > 0.1
