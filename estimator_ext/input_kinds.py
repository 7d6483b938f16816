"""What an input_fn may return, datasets or tensors, and what tensors cannot have."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import GLOBAL_ITERATORS

from hostopt.tensorflow.background import HOST_DEVICE

__all__: list[str] = []

_log = tf.get_logger()

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
