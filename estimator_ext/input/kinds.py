"""The two kinds of input that an input_fn may return: datasets and tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from estimator_ext._tf_private import GLOBAL_ITERATORS
from hostopt.tensorflow.background import HOST_DEVICE

_log = tf.get_logger()

_UNEVEN = "a rank whose data end early ends the training of all ranks with an error (uneven_data)"
_RESUME = "a resumed training reads its data from the beginning (exact resume)"


def prefetched(data: Any, depth: int) -> tf.data.Dataset:
    """Adds prefetching, on the host, to the end of a dataset."""
    if not isinstance(data, tf.data.Dataset):
        raise ValueError(
            f"RunConfig.prefetch_depth is {depth} and input_fn returned a {type(data).__name__}, "
            "wanted a tf.data.Dataset: only a dataset can be prefetched. Return a dataset, or "
            "leave prefetch_depth out"
        )
    with tf.device(HOST_DEVICE):
        return data.prefetch(depth)


def log_limits(data: Any, size: int, *, is_counted: bool) -> None:
    """Logs the limits of a training whose input_fn returns tensors."""
    if isinstance(data, tf.data.Dataset):
        return
    limits = [_UNEVEN] if size > 1 else []
    # only iterators have a state to save; batches that are counted are skipped instead
    if not is_counted and not tf.compat.v1.get_collection(GLOBAL_ITERATORS):
        limits.append(_RESUME)
    if limits:
        _log.info(
            "input_fn returned tensors, not a tf.data.Dataset: %s. Return a dataset to avoid that",
            ", and ".join(limits),
        )
