"""One process of the benchmark: trains the MNIST network and reports its steps per second."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks import training

WARM_UP_STEPS, BATCH = 50, 64


def make_model_fn(tf: Any, hidden: int, wrap: Any) -> Any:
    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        layers = tf.keras.layers
        x = layers.MaxPooling2D()(layers.Conv2D(32, 3, activation="relu")(features))
        x = layers.Dense(hidden, activation="relu")(layers.Flatten()(x))
        logits = layers.Dense(10)(x)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        loss = tf.reduce_sum(losses) / BATCH
        optimizer = wrap(tf.compat.v1.train.AdamOptimizer(1e-3))
        train_op = optimizer.minimize(loss, tf.compat.v1.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def make_input_fn(tf: Any) -> Any:
    def input_fn() -> Any:
        random = np.random.RandomState(0)
        x = random.rand(8, BATCH, 28, 28, 1).astype(np.float32)
        y = random.randint(0, 10, (8, BATCH))
        return tf.data.Dataset.from_tensor_slices((x, y)).repeat().prefetch(2)

    return input_fn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    systems = ["none", "hostopt", "api", "mwms", "horovod"]
    parser.add_argument("--system", choices=systems, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps that are timed")
    parser.add_argument("--meeting", type=Path, required=True, help="directory, empty at first")
    parser.add_argument("--workers", type=int, default=2, help="processes that meet")
    parser.add_argument("--unchecked", action="store_true", help="leave hostopt's checks out")
    args = parser.parse_args()
    if args.unchecked:
        training.disable_checks()
    if args.system == "none":
        del os.environ["TF_CONFIG"]
    import tensorflow as tf

    strategy, hooks, alone = None, [], None
    wrap = lambda optimizer: optimizer  # noqa: E731
    if args.system in ("api", "horovod"):
        if args.system == "api":
            import estimator_ext.horovod as hvd
        else:
            import horovod.tensorflow as hvd

        hvd.init()
        hooks.append(hvd.BroadcastGlobalVariablesHook(0))
        wrap = hvd.DistributedOptimizer
        classes = tf.estimator
    else:
        import estimator_ext

        estimator_ext.install()
        classes = estimator_ext if args.system == "hostopt" else tf.estimator
    if args.system == "none":
        alone = args.meeting
    elif args.system == "hostopt":
        strategy = estimator_ext.HostOffloadStrategy()
    elif args.system == "mwms":
        ring = tf.distribute.experimental.CommunicationImplementation.RING
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            communication_options=tf.distribute.experimental.CommunicationOptions(
                implementation=ring
            )
        )
    config = classes.RunConfig(
        train_distribute=strategy, save_summary_steps=None, log_step_count_steps=None
    )
    model_fn, input_fn = make_model_fn(tf, args.hidden, wrap), make_input_fn(tf)
    hooks.append(training.make_hook(tf, WARM_UP_STEPS, args.steps, alone, args.workers))
    # communicating ranks make the same number of steps; the others are stopped by their hook
    max_steps = None if alone else WARM_UP_STEPS + args.steps
    with tempfile.TemporaryDirectory() as model_dir:
        estimator = classes.Estimator(model_fn, model_dir, config)
        if args.system == "mwms":
            train_spec = tf.estimator.TrainSpec(input_fn, max_steps, hooks)
            eval_spec = tf.estimator.EvalSpec(input_fn, 1)
            tf.estimator.train_and_evaluate(estimator, train_spec, eval_spec)
        else:
            estimator.train(input_fn, max_steps=max_steps, hooks=hooks)


if __name__ == "__main__":
    main()
