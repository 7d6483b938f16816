"""One process of the benchmark: trains a tiny model and reports the times of its steps."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks import training

WARM_UP_STEPS, BATCH, BATCHES = 100, 8, 8
ROWS, WIDTH = 16, 4  # of a sparse model's table
INPUTS = 8  # of a dense model


def predict_dense(tf: Any, x: Any, variables: int) -> Any:
    """Predicts a sum of small products, each with a separate matrix."""
    matrices = [
        tf.compat.v1.get_variable(f"matrix_{number}", [INPUTS, WIDTH])
        for number in range(variables)
    ]
    parts = tf.unstack(x, axis=1)  # so that no two gradients are the same
    return tf.add_n([tf.matmul(*pair) for pair in zip(parts, matrices)])


def predict_sparse(tf: Any, ids: Any, variables: int) -> Any:
    """Predicts a sum of rows, each of a separate table."""
    tables = [
        tf.compat.v1.get_variable(f"table_{number}", [ROWS, WIDTH]) for number in range(variables)
    ]
    columns = tf.unstack(ids, axis=1)
    return tf.add_n([tf.nn.embedding_lookup(*pair) for pair in zip(tables, columns)])


PREDICT = {"dense": predict_dense, "sparse": predict_sparse}


def make_model_fn(tf: Any, kind: str, variables: int) -> Any:
    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        loss = tf.reduce_mean(tf.square(PREDICT[kind](tf, features, variables) - labels))
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(1e-3)
        train_op = optimizer.minimize(loss, tf.compat.v1.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def make_batches(kind: str, variables: int, seed: int) -> tuple[Any, Any]:
    """Returns features and labels of some batches. Of 8 ids out of 16 some are drawn twice."""
    random = np.random.RandomState(seed)
    labels = random.rand(BATCHES, BATCH, WIDTH).astype(np.float32)
    if kind == "sparse":
        return random.randint(0, ROWS, (BATCHES, BATCH, variables)), labels
    return random.rand(BATCHES, BATCH, variables, INPUTS).astype(np.float32), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=["stock", "hostopt"], required=True)
    parser.add_argument("--kind", choices=PREDICT, required=True)
    parser.add_argument("--variables", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps that are timed")
    parser.add_argument("--meeting", type=Path, help="directory, empty at first")
    args = parser.parse_args()
    import tensorflow as tf

    import estimator_ext

    estimator_ext.install()
    strategy, rank, classes = None, 0, tf.estimator
    if args.system == "hostopt":
        strategy, classes = estimator_ext.HostOffloadStrategy(), estimator_ext
        rank = strategy.cluster.rank
    batches = make_batches(args.kind, args.variables, rank)

    def input_fn() -> Any:
        return tf.data.Dataset.from_tensor_slices(batches).repeat()

    hook = training.make_hook(tf, WARM_UP_STEPS, args.steps, args.meeting)
    # independent processes are stopped by their hook, when both have been timed
    max_steps = None if args.meeting else WARM_UP_STEPS + args.steps
    with tempfile.TemporaryDirectory() as model_dir:
        config = training.make_config(classes, strategy)
        model_fn = make_model_fn(tf, args.kind, args.variables)
        estimator = classes.Estimator(model_fn, model_dir, config)
        estimator.train(input_fn, max_steps=max_steps, hooks=[hook])


if __name__ == "__main__":
    main()
