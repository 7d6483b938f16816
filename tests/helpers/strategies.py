"""Ranks as threads of this process, each with a strategy and a graph."""

from __future__ import annotations

import threading
from typing import Any, Callable

import tensorflow as tf
from harness import deadline_s

import estimator_ext


def resolver(addresses: list[str], index: int, job: str = "worker") -> Any:
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": addresses}), task_type=job, task_id=index
    )


def as_ranks(addresses: list[str], work: Callable[[Any], Any]) -> list[Any]:
    """Runs `work(strategy)` for each rank in a thread of this process; returns the results."""
    results: dict[int, Any] = {}

    def run(rank: int) -> None:
        strategy = estimator_ext.HostOffloadStrategy(
            resolver(addresses, rank),
            accelerator="/device:CPU:1",
            collective_timeout_s=deadline_s(30),
        )
        try:
            with tf.Graph().as_default(), strategy.propagate_errors():
                results[rank] = work(strategy)
            strategy.close()
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(addresses))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_s(60))
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[rank] for rank in range(len(addresses))]


def session(strategy: Any, **fields: Any) -> tf.compat.v1.Session:
    config = tf.compat.v1.ConfigProto(allow_soft_placement=False, **fields)
    return tf.compat.v1.Session(config=strategy.update_config_proto(config))
