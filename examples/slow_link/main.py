"""Trains digits in four ways, which send ever less over the link between two workers.

hostopt run -np 2 -- python examples/slow_link/main.py
sudo .venv/bin/python examples/slow_link/link.py
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import picture
import tensorflow as tf

import estimator_ext

sys.path.append(str(Path(__file__).parents[1] / "mnist"))
import data

estimator_ext.install()
tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)


def outer_optimizer():
    return tf.compat.v1.train.MomentumOptimizer(0.7, 0.9, use_nesterov=True)


def ways(every):
    """Returns the options of the strategy in each way; `every` steps are between two exchanges."""
    diloco = {"sync_every": every, "outer_optimizer": outer_optimizer}
    return {
        "every step": {},
        "averaging": {"sync_every": every},
        "DiLoCo": diloco,
        "DiLoCo, int8": {**diloco, "sync_compression": "int8"},
    }


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data-dir", help="directory of the four MNIST IDX files, plain or .gz")
    parser.add_argument("--output", type=Path, default="slow_link_output", help="directory")
    parser.add_argument("--steps", type=int, default=300, help="steps of a worker")
    parser.add_argument("--every", type=int, default=50, help="steps between two exchanges")
    parser.add_argument("--batch-size", type=int, default=32, help="images per worker and step")
    parser.add_argument("--hidden", type=int, default=256, help="units of the dense layer")
    return parser.parse_args()


def make_model_fn(hidden):
    def model_fn(features, labels, mode):
        layers = tf.keras.layers
        x = layers.MaxPooling2D()(layers.Conv2D(32, 3, activation="relu")(features))
        x = layers.Dense(hidden, activation="relu")(layers.Flatten()(x))
        logits = layers.Dense(data.CLASSES)(x)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        loss = tf.reduce_mean(losses, name="loss")
        accuracy = tf.compat.v1.metrics.accuracy(labels, tf.argmax(logits, axis=1))
        metrics = {"accuracy": accuracy} if mode == tf.estimator.ModeKeys.EVAL else None
        step = tf.compat.v1.train.get_global_step()
        train_op = tf.compat.v1.train.AdamOptimizer(1e-3).minimize(loss, step)
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, train_op=train_op, eval_metric_ops=metrics
        )

    return model_fn


def make_input_fns(digits, batch_size):
    """Returns input_fns of endless training images of a worker, and of all test images."""

    def dataset_of(images, labels):
        return tf.data.Dataset.from_tensor_slices((images[..., np.newaxis], labels))

    def normalise(images, labels):
        return tf.cast(images, tf.float32) / 255, tf.cast(labels, tf.int64)

    def train_input_fn(input_context):
        workers, rank = input_context.num_input_pipelines, input_context.input_pipeline_id
        images = dataset_of(digits.x_train[rank::workers], digits.y_train[rank::workers])
        return images.shuffle(10_000, seed=rank).repeat().batch(batch_size).map(normalise)

    def test_input_fn():
        return dataset_of(digits.x_test, digits.y_test).batch(500).map(normalise)

    return train_input_fn, test_input_fn


class Recorder(tf.estimator.SessionRunHook):
    """Records the loss and the time of each step, and the bytes that this worker sends.

    Attributes:
      losses: loss after each step.
      seconds: time since the beginning of the first step, after each step.
    """

    def __init__(self, traffic):
        self.losses, self.seconds = [], []
        self._traffic = traffic

    def before_run(self, run_context):
        if not self.losses:
            self._started_s = time.perf_counter()
            self._bytes = self._traffic.payload_bytes
        return tf.estimator.SessionRunArgs("loss:0")

    def after_run(self, run_context, run_values):
        self.losses.append(float(run_values.results))
        self.seconds.append(time.perf_counter() - self._started_s)

    def sent_mb(self):
        return (self._traffic.payload_bytes - self._bytes) / 1e6


def train(options, digits, args):
    """Trains in one way. Returns its numbers on rank 0, and None on others."""
    # without shared memory, as between two machines
    strategy = estimator_ext.HostOffloadStrategy(communication="grpc+tcp", **options)
    tf.keras.utils.set_random_seed(1)  # all ways begin with the same variables
    config = estimator_ext.RunConfig(
        train_distribute=strategy, save_checkpoints_steps=args.steps, save_summary_steps=None
    )
    train_input_fn, test_input_fn = make_input_fns(digits, args.batch_size)
    recorder = Recorder(strategy.communicator.transport.traffic)
    with tempfile.TemporaryDirectory() as model_dir:
        estimator = estimator_ext.Estimator(make_model_fn(args.hidden), model_dir, config)
        estimator.train(train_input_fn, hooks=[recorder], max_steps=args.steps)
        sent_mb = recorder.sent_mb()  # with the last synchronisation
        strategy.close()
        if strategy.cluster.rank:
            return None
        accuracy = float(estimator.evaluate(test_input_fn)["accuracy"])
    numbers = {"loss": recorder.losses, "seconds": recorder.seconds}
    return {**numbers, "sent_mb": sent_mb, "accuracy": accuracy}


def main():
    args = parse_args()
    digits = data.load(args.data_dir)
    runs = {}
    for name, options in ways(args.every).items():
        run = train(options, digits, args)
        if run is not None:
            runs[name] = run
            print(
                f"{name}: {run['seconds'][-1]:.1f} s, {run['sent_mb']:.1f} MB sent, "
                f"test accuracy {run['accuracy']:.4f}",
                flush=True,
            )
    if runs:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "runs.json").write_text(json.dumps(runs))
        picture.draw(runs, args.output / "runs.png")
        print(f"picture: {args.output / 'runs.png'}")


if __name__ == "__main__":
    main()
