"""One worker behind a slow link: trains the MNIST network in several ways, one after the other."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tensorflow as tf

import estimator_ext
from benchmarks import common, local_ways, network, training
from benchmarks.mnist_scaling import rank as mnist

estimator_ext.install()

ALONE, OFFLOAD = "none", "offload"
_FEW = 3  # warm-up steps that each use the link


class Link(tf.estimator.SessionRunHook):
    """Slows the link from the second step on, and counts the bytes of the timed steps.

    So the first and the last synchronisation take little time of the benchmark.

    Args:
      mbit: rate in Mbit/s; 0 for no limit.
      warm_up_steps: number of steps that are not counted, 2 or more.
      steps: number of counted steps.
    """

    def __init__(self, mbit: float, warm_up_steps: int, steps: int) -> None:
        self._mbit = mbit
        self._warm_up_steps = warm_up_steps
        self._steps = steps
        self._done = 0
        self._before = 0
        self.sent_bytes = 0.0  # in a step

    def before_run(self, run_context: Any) -> None:
        if self._done == 1 and self._mbit:
            network.limit_own_rate(self._mbit * 1e6)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._done += 1
        if self._done == self._warm_up_steps:
            self._before = network.sent_bytes()
        if self._done == self._warm_up_steps + self._steps:
            self.sent_bytes = (network.sent_bytes() - self._before) / self._steps
            if self._mbit:
                network.limit_own_rate(None)


def train(name: str, steps: int, args: argparse.Namespace) -> dict[str, Any]:
    """Trains in one way.

    Args:
      name: one of the ways.
      steps: number of timed steps.
      args: arguments of the program.

    Returns:
      Speed and bytes.
    """
    strategy, warm_up = None, args.warm_up
    if name == OFFLOAD:
        strategy = estimator_ext.HostOffloadStrategy()
    elif name != ALONE:
        way = local_ways.WAYS[name]
        options = local_ways.options_of(way, args.every, new_outer)
        if way.is_local:  # the first synchronisation allocates memory
            options["sync_warmup_steps"] = 1
        else:
            warm_up = min(warm_up, _FEW)
        strategy = estimator_ext.HostOffloadStrategy(**options)
    result: dict[str, Any] = {"way": name}
    link = Link(args.mbit, warm_up, steps)
    alone = args.meeting / name if name in (ALONE, OFFLOAD) else None
    if alone is not None:
        alone.mkdir(exist_ok=True)
    timer = training.make_hook(tf, warm_up, steps, alone, report=result.update)
    config = training.make_config(estimator_ext, strategy)
    model_fn = mnist.make_model_fn(tf, args.hidden, lambda optimizer: optimizer)
    with tempfile.TemporaryDirectory() as model_dir:
        estimator = estimator_ext.Estimator(model_fn, model_dir, config)
        # the last synchronisation follows another step
        max_steps = None if alone else warm_up + steps + 1
        estimator.train(mnist.make_input_fn(tf), [link, timer], max_steps=max_steps)
    if strategy is not None:
        strategy.close()
    return {**result, "sent_bytes": link.sent_bytes}


def new_outer() -> tf.compat.v1.train.Optimizer:
    return tf.compat.v1.train.MomentumOptimizer(0.7, 0.9, use_nesterov=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    ways = [ALONE, OFFLOAD, *local_ways.WAYS]
    parser.add_argument("--ways", nargs="+", choices=ways, required=True)
    parser.add_argument("--steps", type=int, nargs="+", required=True, help="timed, of each way")
    parser.add_argument("--warm-up", type=int, required=True, help="steps that are not timed")
    parser.add_argument("--every", type=int, required=True, help="steps of an interval")
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--mbit", type=float, required=True, help="rate of the link; 0: no limit")
    parser.add_argument("--meeting", type=Path, required=True, help="directory, empty at first")
    args = parser.parse_args()
    cluster = os.environ.pop("TF_CONFIG")
    for name, steps in zip(args.ways, args.steps):
        if name not in (ALONE, OFFLOAD):
            os.environ["TF_CONFIG"] = cluster
        common.report(**train(name, steps, args))
        os.environ.pop("TF_CONFIG", None)


if __name__ == "__main__":
    main()
