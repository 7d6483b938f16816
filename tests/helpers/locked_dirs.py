"""Estimators that share a model_dir."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf
from one_weight import model_fn

import estimator_ext
from estimator_ext.chief_liveness import ChiefLiveness


def data() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(([[1.0]], [[1.0]])).repeat()


class InTheMiddle(tf.compat.v1.train.SessionRunHook):
    """Calls a function once, after a step."""

    def __init__(self, fn: Any) -> None:
        self._fn = fn

    def after_run(self, run_context: object, run_values: object) -> None:
        self._fn()
        self._fn = lambda: None


def estimator_in(model_dir: Path, distributed: bool = True) -> estimator_ext.Estimator:
    strategy = estimator_ext.HostOffloadStrategy() if distributed else None
    config = estimator_ext.RunConfig(train_distribute=strategy)
    return estimator_ext.Estimator(model_fn, str(model_dir), config)


def wait(chief: ChiefLiveness, pauses: int, pause_s: float = 10.0) -> None:
    for _ in range(pauses):
        chief.waited(pause_s)
