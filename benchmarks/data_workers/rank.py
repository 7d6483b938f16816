"""One process of the benchmark: trains a small layer on expensive data, or prepares them."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import training

WARM_UP_STEPS, BATCH, FEATURES, SIDE = 20, 64, 784, 192


def prepare(tf: Any, data: Any, work: str, cost: float) -> Any:
    """Returns the dataset of batches whose preparation costs time.

    Args:
      tf: TensorFlow.
      data: dataset of numbers.
      work: "cpu" multiplies matrices, "wait" sleeps as if for storage.
      cost: number of products of a batch, or milliseconds.
    """
    if work == "wait":
        from tensorflow.python.data.experimental.ops import testing

        data = data.apply(testing.sleep(int(1000 * cost)))

    def batch_of(number: Any) -> Any:
        seed = tf.stack([number, 0])
        matrix = tf.random.stateless_normal([SIDE, SIDE], seed) / SIDE**0.5
        if work == "cpu":
            state = (0, matrix)
            _, matrix = tf.while_loop(
                lambda i, _: i < int(cost),
                lambda i, product: (i + 1, tf.matmul(product, matrix)),
                state,
            )
        noise = tf.random.stateless_normal([BATCH, FEATURES], seed)
        features = noise + 1e-9 * tf.reduce_mean(matrix)
        return features, tf.reduce_mean(features, axis=1, keepdims=True)

    return data.map(batch_of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=["cpu", "wait"], required=True)
    parser.add_argument("--cost", type=float, required=True, help="products, or ms")
    parser.add_argument("--steps", type=int, required=True, help="steps that are timed")
    args = parser.parse_args()
    import tensorflow as tf

    import estimator_ext

    estimator_ext.install()

    def input_fn(input_context: Any) -> Any:
        data = tf.data.Dataset.range(1_000_000)
        data = data.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
        return prepare(tf, data, args.work, args.cost).repeat().prefetch(2)

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        loss = tf.reduce_mean((tf.compat.v1.layers.dense(features, 1) - labels) ** 2)
        step = tf.compat.v1.train.get_global_step()
        train_op = tf.compat.v1.train.GradientDescentOptimizer(0.01).minimize(loss, step)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    config = training.make_config(estimator_ext, estimator_ext.HostOffloadStrategy())
    with tempfile.TemporaryDirectory() as model_dir:
        estimator = estimator_ext.Estimator(model_fn, model_dir, config)
        hook = training.make_hook(tf, WARM_UP_STEPS, args.steps)
        estimator.train(input_fn, max_steps=WARM_UP_STEPS + args.steps, hooks=[hook])


if __name__ == "__main__":
    main()
