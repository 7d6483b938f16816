"""One process of the benchmark: trains the MNIST network and prints its steps per second."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

import numpy as np

WARM_UP_STEPS, BATCH = 50, 64


def make_hook(tf: Any) -> Any:
    class Rate(tf.estimator.SessionRunHook):
        """Times the steps after the warm-up."""

        steps = 0
        started_s = 0.0

        def after_run(self, run_context: Any, run_values: Any) -> None:
            self.steps += 1
            if self.steps == WARM_UP_STEPS:
                self.started_s = time.perf_counter()

        def end(self, session: Any) -> None:
            seconds = time.perf_counter() - self.started_s
            print(f"steps/s {(self.steps - WARM_UP_STEPS) / seconds:.2f}", flush=True)

    return Rate()


def make_model_fn(tf: Any, hidden: int) -> Any:
    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        layers = tf.keras.layers
        x = layers.MaxPooling2D()(layers.Conv2D(32, 3, activation="relu")(features))
        x = layers.Dense(hidden, activation="relu")(layers.Flatten()(x))
        logits = layers.Dense(10)(x)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        loss = tf.reduce_sum(losses) / BATCH
        optimizer = tf.compat.v1.train.AdamOptimizer(1e-3)
        train_op = optimizer.minimize(loss, tf.compat.v1.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=["none", "hostopt", "mwms"], required=True)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--steps", type=int, default=350)
    args = parser.parse_args()
    if args.system == "none":
        del os.environ["TF_CONFIG"]
    import tensorflow as tf

    import estimator_ext

    estimator_ext.install()

    def input_fn() -> Any:
        random = np.random.RandomState(0)
        x = random.rand(8, BATCH, 28, 28, 1).astype(np.float32)
        y = random.randint(0, 10, (8, BATCH))
        return tf.data.Dataset.from_tensor_slices((x, y)).repeat().prefetch(2)

    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = {
        "none": lambda: None,
        "hostopt": estimator_ext.HostOffloadStrategy,
        "mwms": lambda: tf.distribute.MultiWorkerMirroredStrategy(communication_options=options),
    }[args.system]()
    classes = tf.estimator if args.system == "mwms" else estimator_ext
    config = classes.RunConfig(
        train_distribute=strategy, save_summary_steps=None, log_step_count_steps=None
    )
    estimator = classes.Estimator(make_model_fn(tf, args.hidden), tempfile.mkdtemp(), config)
    train_spec = tf.estimator.TrainSpec(input_fn, args.steps, hooks=[make_hook(tf)])
    if args.system == "mwms":
        tf.estimator.train_and_evaluate(estimator, train_spec, tf.estimator.EvalSpec(input_fn, 1))
    else:
        estimator.train(input_fn, max_steps=args.steps, hooks=train_spec.hooks)


if __name__ == "__main__":
    main()
