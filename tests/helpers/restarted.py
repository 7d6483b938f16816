"""Trainings under `hostopt run`, of which a rank is killed in each attempt."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from harness import PROGRAMS, QUIET
from launcher import Launcher

STEPS = 9


SETTINGS = {
    "optimizers": ["adam"],
    "steps": STEPS,
    "checkpoint_steps": 1,
    "bucket_mb": 2**-12,
    "collective_timeout_s": 30.0,
}


def arguments(directory: Path, **chosen: Any) -> str:
    return json.dumps({**SETTINGS, "model_dir": str(directory), **chosen})


def final(directory: Path) -> dict[str, np.ndarray]:
    """Returns all variables after the last step."""
    reader = tf.train.load_checkpoint(str(directory / "adam" / f"model.ckpt-{STEPS}"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def run(launcher: Launcher, directory: Path, *options: str, slot: int, **chosen: Any) -> str:
    """Trains under the launcher; a slot is killed in the fourth step of each attempt."""
    fault = {"point": "between-updates", "step": 3, "action": "kill", "slot": slot}
    _, errors = launcher.ended(
        *options,
        "--",
        sys.executable,
        str(PROGRAMS / "train_with_fault.py"),
        arguments(directory, fault=fault, **chosen),
        limit_s=150,
        **QUIET,
    )
    return errors
