"""Samples of a batch, and their checksum: they show whether two batches are the same."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

_TEXTS, _NUMBERS = 16, 4096  # in a sample of a tensor
_NOT_SAMPLED = (tf.variant, tf.resource)


def samples_of(batch: Any) -> list[tf.Tensor]:
    """Returns the beginning of each tensor of a batch, of shape [samples].

    Sparse and ragged tensors count as their parts; datasets, tables and the like have no samples.
    """
    tensors = filter(tf.is_tensor, tf.nest.flatten(batch, expand_composites=True))
    return [
        tf.reshape(each, [-1])[: _TEXTS if each.dtype == tf.string else _NUMBERS]
        for each in tensors
        if each.dtype not in _NOT_SAMPLED
    ]


def sample_of(array: Any) -> np.ndarray[Any, Any]:
    """Returns what `samples_of` returns for a tensor of this value."""
    values = np.asarray(array)
    return values.reshape(-1)[: _TEXTS if values.dtype.kind in "OSU" else _NUMBERS]


def checksum(samples: Iterable[Any]) -> int:
    """Returns a CRC-32.

    Strings count from their last slash on: a file's directory may differ between machines.
    """
    value = 0
    for array in map(np.asarray, samples):
        is_text = array.dtype.kind in "OSU"
        data = b"\0".join(map(_name_of_file, array.flat)) if is_text else array.tobytes()
        value = zlib.crc32(data, value)
    return value


def _name_of_file(text: Any) -> bytes:
    data = text if isinstance(text, bytes) else str(text).encode()
    return data.rpartition(b"/")[2]
