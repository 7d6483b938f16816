"""One worker with a network of equal dense layers: its step, parts of it, or its ring."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import hostopt
from benchmarks import common, reducing, training

WARM_UP_STEPS = 5
PARTS = ("forward", "backward", "step", "ring")


def train(part: str, args: argparse.Namespace) -> None:
    """Times the steps of an Estimator.

    Args:
      part: "forward" alone, forward and "backward", or the whole "step" with its update.
      args: arguments of the program.
    """
    import tensorflow as tf

    import estimator_ext

    estimator_ext.install()

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        initializer = tf.compat.v1.random_normal_initializer(stddev=args.width**-0.5)
        kernels = [
            tf.compat.v1.get_variable(
                f"kernel_{index}", (args.width, args.width), tf.float32, initializer
            )
            for index in range(args.layers)
        ]
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(1e-3)
        if args.layer_ms:
            loss, gradients = simulate(kernels)
        else:
            x = features
            for kernel in kernels:
                x = tf.nn.relu(tf.matmul(x, kernel))
            loss = tf.reduce_mean(tf.square(x - labels))
            gradients = [g for g, _ in optimizer.compute_gradients(loss, var_list=kernels)]
        calls = {
            "forward": (tf.no_op, []),
            "backward": (consume, gradients),
            "step": (lambda *sums: optimizer.apply_gradients(zip(sums, kernels)), gradients),
        }
        return estimator_ext.EstimatorSpec(
            mode, loss=loss, train_op=tf.identity(loss), host_call=calls[part]
        )

    def simulate(kernels: list[tf.Variable]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Takes the time of an accelerator, which leaves the processor idle."""
        zeros = np.zeros((args.width, args.width), np.float32)

        def wait(_: Any, ms: float, result: Any) -> Any:
            time.sleep(ms / 1e3)
            return result

        forward_ms = args.layer_ms * len(kernels) / 2
        previous = loss = tf.numpy_function(
            lambda x: wait(x, forward_ms, np.float32(0)), [kernels[0][0, 0]], tf.float32
        )
        gradients = []
        for _ in kernels:
            gradient = tf.numpy_function(
                lambda x: wait(x, args.layer_ms, zeros), [previous], tf.float32
            )
            gradient.set_shape(zeros.shape)
            gradients.append(gradient)
            previous = gradient[0, 0]
        return loss, gradients[::-1]

    def consume(*gradients: tf.Tensor) -> tf.Tensor:
        """Uses gradients without copying them, so that TensorFlow computes them."""
        return tf.numpy_function(lambda *_: np.int32(0), gradients, tf.int32)

    def input_fn() -> Any:
        random = np.random.RandomState(0)
        x = random.standard_normal((args.batch, args.width)).astype(np.float32)
        return tf.data.Dataset.from_tensors((x, x)).cache().repeat()

    config = estimator_ext.RunConfig(
        train_distribute=estimator_ext.HostOffloadStrategy(),
        save_summary_steps=None,
        log_step_count_steps=None,
    )
    hook = training.make_hook(tf, WARM_UP_STEPS, args.steps, args.alone)
    with tempfile.TemporaryDirectory() as model_dir:
        estimator = estimator_ext.Estimator(model_fn, model_dir, config)
        # communicating ranks make the same number of steps; the others are stopped by their hook
        max_steps = None if args.alone else WARM_UP_STEPS + args.steps
        estimator.train(input_fn, max_steps=max_steps, hooks=[hook])


def ring(args: argparse.Namespace) -> None:
    """Times the reductions of a step, without computation."""
    gradients = [np.zeros((args.width, args.width), np.float32) for _ in range(args.layers)]
    with hostopt.connect() as communicator:
        parts = reducing.Gradients(communicator, gradients)
        seconds = []
        for _ in range(WARM_UP_STEPS + args.steps):
            communicator.barrier()
            started_s = time.perf_counter()
            parts.reduce()
            seconds.append(time.perf_counter() - started_s)
        communicator.barrier()
        rate = 1 / common.median(seconds[WARM_UP_STEPS:])
        common.report(steps_per_s=rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument(
        "--layer-ms",
        type=float,
        default=0.0,
        help="backward of a layer on a simulated accelerator; 0 computes on the processor",
    )
    parser.add_argument("--steps", type=int, required=True, help="steps that are timed")
    parser.add_argument("--alone", type=Path, help="do not communicate; an empty directory")
    args = parser.parse_args()
    if args.alone is not None:
        del os.environ["TF_CONFIG"]
    if args.part == "ring":
        ring(args)
    else:
        train(args.part, args)


if __name__ == "__main__":
    main()
