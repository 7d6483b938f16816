"""Datasets that ranks iterate in functions of TensorFlow 2 and eagerly."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext._tf_private import options_in_graph, variant_tensor
from estimator_ext.errors import UnsupportedError
from estimator_ext.pipelines.common_seed import CommonSeed
from estimator_ext.pipelines.data_order import OrderCheck
from estimator_ext.pipelines.pipeline import reads_files
from estimator_ext.pipelines.sharding import POLICIES
from hostopt.process_ring import ProcessRing

_POLICY = tf.data.experimental.AutoShardPolicy
SAME_ORDER = (
    "Give its shuffles, generators and random numbers seeds that are the same on all ranks; or "
    "let each rank read everything in its own order with AutoShardPolicy.OFF"
)


def with_policy(dataset: Any, policy: str | None) -> Any:
    """Returns a dataset that TensorFlow shards as the option auto_shard says."""
    if policy is None:
        return dataset
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = POLICIES[policy]
    return dataset.with_options(options)


def in_one_order(check: OrderCheck, dataset: Any, seed: CommonSeed) -> Any:
    """Checks that ranks that shard by position have the same data in one order; collective."""
    with options_in_graph():
        policy = dataset.options().experimental_distribute.auto_shard_policy
    graph = getattr(variant_tensor(dataset), "graph", None)
    # what a function has created cannot be read
    if policy in (_POLICY.OFF, _POLICY.FILE) or (graph is not None and graph.building_function):
        return dataset
    with tf.init_scope() if graph is None else contextlib.nullcontext():
        if policy == _POLICY.AUTO and reads_files(dataset):  # each rank reads its part of them
            return dataset
        dataset, number = check.in_one_order(dataset)
        seed.renew(number)
    return dataset


def check_no_data_workers(cluster: hostopt.Cluster) -> None:
    """Checks that no data workers wait for a pipeline that they will not get."""
    if cluster.data:
        raise UnsupportedError(
            f"the cluster has {len(cluster.data)} data workers, which prepare the data of "
            "Estimator.train only, and this program distributes a dataset by itself. Start it "
            "without --data-workers"
        )


def check_lengths(ring: ProcessRing, dataset: Any) -> None:
    """Compares the numbers of batches of the ranks; collective."""
    lengths = _lengths(ring, dataset)
    if len({*lengths}) > 1:
        raise hostopt.ConfigError(
            f"the datasets of the ranks differ in their number of batches ({_shown(lengths)}). "
            "Give all ranks the same dataset, which is sharded, or as many batches with repeat() "
            "and take()"
        )


def check_endless(ring: ProcessRing, dataset: Any) -> None:
    """Checks that the dataset of each rank ends, or of none; collective.

    Ranks whose datasets end ask each other before each batch, and those without a batch get an
    empty one. A rank whose dataset is endless does not ask.
    """
    lengths = _lengths(ring, dataset)
    endless = [length == tf.data.INFINITE_CARDINALITY for length in lengths]
    if any(endless) and not all(endless):
        raise hostopt.ConfigError(
            f"some ranks have endless datasets, and others not ({_shown(lengths)}). Call repeat() "
            "on all ranks, or end all datasets with take()"
        )


def _lengths(ring: ProcessRing, dataset: Any) -> list[int]:
    with tf.init_scope():  # a dataset that a function has created cannot be asked
        is_known = not hasattr(variant_tensor(dataset), "graph")
        length = int(dataset.cardinality()) if is_known else tf.data.UNKNOWN_CARDINALITY
    local = np.array([length], np.int64)
    lengths: list[int] = ring.named.all_gather(local, "the lengths of the datasets").tolist()
    return lengths


def _shown(lengths: list[int]) -> str:
    names = {tf.data.INFINITE_CARDINALITY: "endless", tf.data.UNKNOWN_CARDINALITY: "unknown"}
    return ", ".join(f"rank {i}: {names.get(n, n)}" for i, n in enumerate(lengths))
