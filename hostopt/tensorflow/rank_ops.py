"""Ranks and sizes as tensors, with Horovod's names."""

from __future__ import annotations

import tensorflow as tf

from hostopt.tensorflow import ring
from hostopt.tensorflow.process_sets import refuse_process_set_id


def rank_op(name: str | None = None) -> tf.Tensor:
    """Returns this rank as a tensor.

    Args:
      name: name of the operation in a graph.

    Returns:
      Tensor of shape [], int32.
    """
    return tf.constant(ring.rank(), tf.int32, name=name or "rank")


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks as a tensor; see `rank_op`.

    Args:
      process_set_id: must be 0, the number of the process set of all ranks.
      name: name of the operation in a graph.

    Raises:
      ConfigError: `process_set_id` is not 0.
    """
    refuse_process_set_id(process_set_id)
    return tf.constant(ring.size(), tf.int32, name=name or "size")


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Returns the index of this rank among the ranks of its host; see `rank_op`."""
    return tf.constant(ring.local_rank(), tf.int32, name=name or "local_rank")


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks on this host as a tensor; see `rank_op`."""
    return tf.constant(ring.local_size(), tf.int32, name=name or "local_size")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns 1 as a tensor: this rank is part of the process set of all ranks; see `size_op`."""
    refuse_process_set_id(process_set_id)
    return tf.constant(1, tf.int32, name=name or "process_set_included")
