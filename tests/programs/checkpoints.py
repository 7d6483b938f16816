"""Makes a checkpoint for other TensorFlow versions to restore, or restores one.

Remake the checkpoints of the tests with

    python tests/programs/checkpoints.py make tests/data/checkpoints/X
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import estimator_ext

estimator_ext.install()

SAVED_STEP, LAST_STEP = 5, 10
RANDOM = np.random.RandomState(0)
X = RANDOM.rand(16, 3).astype(np.float32)
Y = RANDOM.randint(0, 2, 16)


def train_input_fn() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(({"x": X}, Y)).repeat()


def predict_input_fn() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors({"x": X})


def model_fn(features: dict[str, tf.Tensor], labels: tf.Tensor, mode: str) -> Any:
    hidden = tf.keras.layers.Dense(4, activation="relu")(features["x"])
    logits = tf.keras.layers.Dense(2)(hidden)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return estimator_ext.EstimatorSpec(mode, {"probabilities": tf.nn.softmax(logits)})
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    loss = tf.reduce_mean(losses)
    optimizer = tf.compat.v1.train.AdamOptimizer(0.05)
    variables = tf.compat.v1.trainable_variables()
    gradients = [g for g, _ in optimizer.compute_gradients(loss, variables)]
    return estimator_ext.EstimatorSpec(
        mode,
        loss=loss,
        train_op=tf.identity(loss),
        host_call=(lambda *host: optimizer.apply_gradients(zip(host, variables)), gradients),
    )


def estimators(directory: Path) -> dict[str, Any]:
    """Returns a custom estimator on the host, and a canned one with a Keras optimizer."""
    strategy = estimator_ext.HostOffloadStrategy()
    config = estimator_ext.RunConfig(train_distribute=strategy, tf_random_seed=1)
    return {
        "custom": estimator_ext.Estimator(model_fn, str(directory / "custom"), config),
        "canned": tf.estimator.DNNClassifier(
            [4],
            [tf.feature_column.numeric_column("x", shape=[3])],
            str(directory / "canned"),
            optimizer=lambda: tf.keras.optimizers.legacy.Adam(0.05),
            config=tf.estimator.RunConfig(tf_random_seed=1),
        ),
    }


def probabilities(estimator: Any) -> list[list[float]]:
    return [p["probabilities"].tolist() for p in estimator.predict(predict_input_fn)]


def make(directory: Path) -> None:
    """Trains to LAST_STEP; keeps the checkpoint of SAVED_STEP and the predictions of both."""
    scratch = directory / "scratch"
    expected = {}
    for name, estimator in estimators(scratch).items():
        estimator.train(train_input_fn, max_steps=SAVED_STEP)
        kept = directory / name
        kept.mkdir(parents=True)
        for path in (scratch / name).glob(f"model.ckpt-{SAVED_STEP}.*"):
            if path.suffix != ".meta":
                shutil.copy(path, kept)
        (kept / "checkpoint").write_text(f'model_checkpoint_path: "model.ckpt-{SAVED_STEP}"\n')
        saved = probabilities(estimator)
        estimator.train(train_input_fn, max_steps=LAST_STEP)
        expected[name] = {"saved": saved, "last": probabilities(estimator)}
    (directory / "expected.json").write_text(json.dumps(expected))
    shutil.rmtree(scratch)


def restore(directory: Path) -> None:
    """Predicts from the checkpoint, resumes the training, and predicts again."""
    expected = json.loads((directory / "expected.json").read_text())
    for name, estimator in estimators(directory).items():
        assert int(estimator.get_variable_value("global_step")) == SAVED_STEP
        np.testing.assert_allclose(probabilities(estimator), expected[name]["saved"], atol=1e-5)
        estimator.train(train_input_fn, max_steps=LAST_STEP)
        assert int(estimator.get_variable_value("global_step")) == LAST_STEP
        # equal only if the slots were restored, too
        np.testing.assert_allclose(probabilities(estimator), expected[name]["last"], atol=1e-5)
        print("RESTORED", name)


if __name__ == "__main__":
    {"make": make, "restore": restore}[sys.argv[1]](Path(sys.argv[2]))
