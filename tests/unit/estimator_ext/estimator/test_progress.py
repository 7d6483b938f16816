"""The progress that the chief writes while it trains, and at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

import estimator_ext
from estimator_ext.estimator.progress import ProgressHook, StepTimestamps
from estimator_ext.graphs.walks import walk
from hostopt.telemetry import progress

estimator_ext.install()

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


@pytest.mark.parametrize("accelerator", ["/device:CPU:0", "/device:CPU:1"])
def test_backward_ends_before_the_first_update(accelerator: str) -> None:
    with tf.Graph().as_default():
        data = tf.data.Dataset.from_tensors(tf.ones([4, 3]))
        features = tf.compat.v1.data.make_one_shot_iterator(data).get_next()
        with tf.device("/device:CPU:0"):
            weights = tf.compat.v1.get_variable("w", [3, 2], use_resource=True)
            optimizer = train.AdamOptimizer()
        with tf.device(accelerator):
            loss = tf.reduce_sum((features @ weights) ** 2)
            pairs = optimizer.compute_gradients(loss)
        with tf.device("/device:CPU:0"):
            update = optimizer.apply_gradients(pairs)
        spec = tf.estimator.EstimatorSpec("train", loss=loss, train_op=update)
        times = StepTimestamps(spec, None).times
        before = walk([times["gradients_s"].op])
    assert pairs[0][0].op in before
    assert "ResourceApplyAdam" not in {op.type for op in before}
    assert update in walk([times["end_s"].op])
