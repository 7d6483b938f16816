"""One process of the benchmark: trains a model and reports its steps per second."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import training
from benchmarks.embedding import models

WARM_UP_STEPS = 50


def make_model(tf: Any, args: argparse.Namespace, wrap: models.Wrap, directory: str) -> Any:
    """Returns the model function of `args.model`."""
    if args.model == "deepfm":
        return models.make_deepfm(tf, args.optimizer, wrap)
    if args.model == "wide-deep":
        return models.make_wide_deep(tf, directory)
    return models.make_deep(tf, averages=args.model == "ema")


DATA = {
    "deepfm": models.make_clicks,
    "wide-deep": models.make_census,
    "dense": models.make_numbers,
    "ema": models.make_numbers,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=["stock", "hostopt", "horovod"], required=True)
    parser.add_argument("--model", choices=DATA, required=True)
    parser.add_argument("--optimizer", choices=["adagrad", "adam"], default="adagrad")
    parser.add_argument("--batch", type=int, required=True, help="examples of this process")
    parser.add_argument("--steps", type=int, required=True, help="steps that are timed")
    parser.add_argument("--sparse-as-dense", action="store_true", help="an option of Horovod's")
    parser.add_argument("--meeting", type=Path, help="directory, empty at first")
    return parser.parse_args()


def main() -> None:
    args = parse()
    import tensorflow as tf

    strategy, rank, hooks = None, 0, []
    wrap: models.Wrap = lambda optimizer: optimizer  # noqa: E731
    if args.system == "horovod":
        import horovod.tensorflow as hvd

        hvd.init()
        rank = hvd.rank()
        hooks.append(hvd.BroadcastGlobalVariablesHook(0))
        wrap = lambda optimizer: hvd.DistributedOptimizer(  # noqa: E731
            optimizer, sparse_as_dense=args.sparse_as_dense
        )
        classes = tf.estimator
    else:
        import estimator_ext

        estimator_ext.install()
        classes = tf.estimator
    if args.system == "hostopt":
        strategy, classes = estimator_ext.HostOffloadStrategy(), estimator_ext
        rank = strategy.cluster.rank
    batches = DATA[args.model](args.batch, rank)

    def input_fn() -> Any:
        return tf.data.Dataset.from_tensor_slices(batches).repeat()

    hooks.append(training.make_hook(tf, WARM_UP_STEPS, args.steps, args.meeting))
    # independent processes are stopped by their hook, when both have been timed
    max_steps = None if args.meeting else WARM_UP_STEPS + args.steps
    with tempfile.TemporaryDirectory() as model_dir:
        model_fn = make_model(tf, args, wrap, model_dir)
        config = training.make_config(classes, strategy)
        estimator = classes.Estimator(model_fn, model_dir, config)
        estimator.train(input_fn, max_steps=max_steps, hooks=hooks)


if __name__ == "__main__":
    main()
