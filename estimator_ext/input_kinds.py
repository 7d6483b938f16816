"""What an input_fn may return, datasets or tensors, and what tensors cannot have."""

from __future__ import annotations

import contextlib
import secrets
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops import distribute
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.data.ops.iterator_ops import GLOBAL_ITERATORS

import hostopt
from estimator_ext import _tf_estimator
from hostopt.tensorflow.background import HOST_DEVICE

__all__: list[str] = []

_log = tf.get_logger()

_AutoShard = tf.data.experimental.AutoShardPolicy
SHARD_POLICIES = {
    "file": _AutoShard.FILE,
    "data": _AutoShard.DATA,
    "off": _AutoShard.OFF,
}
_CURE = (
    "Shard them by input_context.num_input_pipelines and input_pipeline_id, or give the "
    "HostOffloadStrategy auto_shard='data'; auto_shard='off' says that it is meant so"
)

_UNEVEN = "a rank whose data end early ends the training of all with an error (uneven_data)"
_RESUME = "a training that resumes reads its data from the beginning (exact resume)"


def prefetched(data: Any, depth: int) -> tf.data.Dataset:
    """A dataset that prepares batches beforehand, on the host.

    Args:
      data: what input_fn returned.
      depth: `RunConfig.prefetch_depth`, number of batches.

    Returns:
      The dataset with the prefetching at its end.

    Raises:
      ValueError: the data are no dataset.
    """
    if not isinstance(data, tf.data.Dataset):
        raise ValueError(
            f"RunConfig.prefetch_depth is {depth} and input_fn returned a {type(data).__name__}, "
            "wanted a tf.data.Dataset: only a dataset can be prefetched. Return a dataset, or "
            "leave prefetch_depth out"
        )
    with tf.device(HOST_DEVICE):
        return data.prefetch(depth)


def log_limits(data: Any, size: int) -> None:
    """Log what a training does not have because its input_fn returns tensors.

    Args:
      data: what input_fn returned, in the graph of the training.
      size: number of ranks.
    """
    if isinstance(data, tf.data.Dataset):
        return
    limits = [_UNEVEN] if size > 1 else []
    if not tf.compat.v1.get_collection(GLOBAL_ITERATORS):  # whose states can be saved
        limits.append(_RESUME)
    if limits:
        _log.info(
            "input_fn returned tensors, not a tf.data.Dataset: %s. Return a dataset to avoid that",
            ", and ".join(limits),
        )


def sharded(data: Any, context: tf.distribute.InputContext, policy: str | None) -> Any:
    """The part of a dataset that a rank reads, as TensorFlow's own strategies divide it.

    Args:
      data: what an input_fn without input_context returned.
      context: which part.
      policy: "file" or "data"; "off" if each rank is to read all data. None reads all of
        it as well, and warns.

    Returns:
      The dataset, or the data as they are.
    """
    is_dataset = isinstance(data, tf.data.Dataset)
    size, rank = context.num_input_pipelines, context.input_pipeline_id
    if policy == "off":
        return data
    if policy is None or not is_dataset:
        why = "and returned no dataset that could be divided" if policy else ""
        _log.warning(
            "input_fn has no argument input_context %s: each of the %d ranks reads the same data. "
            "%s",
            why,
            size,
            _CURE,
        )
        return data
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = SHARD_POLICIES[policy]
    with tf.device(HOST_DEVICE):
        data = distribute._AutoShardDataset(data.with_options(options), size, rank)
    if rank == 0:
        _log.info("TensorFlow divides the data among %d ranks (auto_shard=%r)", size, policy)
    return data


@contextlib.contextmanager
def in_one_order(communicator: hostopt.Communicator) -> Iterator[None]:
    """Has datasets that are built within shuffle alike on all ranks, so that parts are disjoint.

    Args:
      communicator: of the ranks, which agree on a seed if the graph has none.
    """
    graph = tf.compat.v1.get_default_graph()
    seed = graph.seed
    if seed is None:
        drawn = np.array(secrets.randbits(31))
        graph.seed = int(communicator.broadcast(drawn, what="the seed of the data's order"))
    try:
        yield
    finally:
        graph.seed = seed


@contextlib.contextmanager
def sharded_iterators(
    context: tf.distribute.InputContext, policy: str | None
) -> Iterator[list[Any]]:
    """Has the iterators and queues that an input_fn makes by itself read a rank's part of data.

    With "data" a queue is divided that holds rows of arrays or of a DataFrame, as those of
    `tf.compat.v1.estimator.inputs` do: each rank has every N-th row.

    Args:
      context: which part.
      policy: as for `sharded`.

    Yields:
      What these iterators and queues read.
    """
    made: list[Any] = []
    enqueue = _tf_estimator.feeding._enqueue_data
    kind = dataset_ops.DatasetV1
    names = ("_make_one_shot_iterator", "_make_initializable_iterator")
    stock = {name: getattr(kind, name) for name in names}

    def make_by(name: str) -> Callable[..., Any]:
        def make(dataset: Any, *arguments: Any, **options: Any) -> Any:
            part = dataset_ops.DatasetV1Adapter(sharded(dataset, context, policy))
            made.append(part)
            return stock[name](part, *arguments, **options)

        return make

    def enqueue_part(rows: Any, *arguments: Any, **options: Any) -> Any:
        if policy == "data" and not isinstance(rows, types.FunctionType):
            rows = _part_of_rows(rows, context)
            made.append(rows)
        return enqueue(rows, *arguments, **options)

    try:
        _tf_estimator.feeding._enqueue_data = enqueue_part
        for name in names:
            setattr(kind, name, make_by(name))
        yield made
    finally:
        _tf_estimator.feeding._enqueue_data = enqueue
        for name, method in stock.items():
            setattr(kind, name, method)


def _part_of_rows(rows: Any, context: tf.distribute.InputContext) -> Any:
    """The rows that a rank reads, as many as the others read.

    Args:
      rows: an array, an OrderedDict of arrays, or a DataFrame.
      context: which part.

    Returns:
      The same kind of data.

    Raises:
      hostopt.ConfigError: there are fewer rows than ranks.
    """
    size, rank = context.num_input_pipelines, context.input_pipeline_id
    is_dict = isinstance(rows, dict)
    count = len(next(iter(rows.values()))) if is_dict else len(rows)
    if count < size:
        raise hostopt.ConfigError(
            f"input_fn reads {count} rows of data, wanted at least one for each of the {size} "
            "ranks. Give it more data, or take fewer ranks"
        )
    if rank == 0:
        left = f"; the last {count % size} are left out" if count % size else ""
        _log.info("each of %d ranks reads every %d-th of %d rows%s", size, size, count, left)
    mine = slice(rank, count - count % size, size)
    if is_dict:
        return type(rows)((name, array[mine]) for name, array in rows.items())
    return rows[mine]
