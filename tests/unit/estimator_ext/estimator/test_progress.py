"""The progress that the chief writes while it trains, and at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

from estimator_ext.estimator.progress import ProgressHook
from hostopt.telemetry import progress

train = tf.compat.v1.train


def test_the_end_of_a_training_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model_dir = tmp_path / "progress.json", "file:///models/digits"
    monkeypatch.setattr(progress, "_path", None)
    monkeypatch.setenv(progress.VARIABLE, str(path))
    with tf.Graph().as_default():
        step = train.create_global_step().assign_add(1)
        hook = ProgressHook({}, None, 1, [], model_dir, 0)
        with train.MonitoredSession(hooks=[hook]) as session:
            session.run(step)
            training = progress.read_progress(str(path))["training"]
            assert not training["is_ended"]
            assert training["model_dir"] == model_dir  # a URL is no path of this machine
    assert progress.read_progress(str(path))["training"]["is_ended"]
