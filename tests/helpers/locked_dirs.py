"""Estimators that share a model_dir."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf
from one_weight import model_fn

import estimator_ext
from estimator_ext.evaluation.evaluation import ChiefLiveness


def data() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(([[1.0]], [[1.0]])).repeat()


def estimator_in(model_dir: Path, distributed: bool = True) -> estimator_ext.Estimator:
    strategy = estimator_ext.HostOffloadStrategy() if distributed else None
    config = estimator_ext.RunConfig(train_distribute=strategy)
    return estimator_ext.Estimator(model_fn, str(model_dir), config)


def wait(chief: ChiefLiveness, pauses: int, pause_s: float = 10.0) -> None:
    for _ in range(pauses):
        chief.waited(pause_s)
