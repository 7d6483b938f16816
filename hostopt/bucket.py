"""Fusion: which gradients share a flat buffer, and where in it each one lies.

Backward produces the gradients of the last variables first, so buckets are filled in reverse
variable order: the first bucket is full, and travels, while backward still works on the others.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hostopt.finite import PIECE, all_within
from hostopt.ring import Array

__all__: list[str] = []

# TensorFlow takes an array over without a copy where it is aligned to this many bytes.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class TensorSpec:
    """One gradient.

    Args:
      name: name of its variable, for warnings and errors.
      shape: its static shape.
      dtype: its numpy dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype.name}"


@dataclass(frozen=True)
class Bucket:
    """Gradients of one dtype that travel together.

    Args:
      indices: positions of the gradients in the list that was planned, in packing order.
      specs: the gradients, in packing order.
    """

    indices: tuple[int, ...]
    specs: tuple[TensorSpec, ...]

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The dtype of all gradients in it."""
        return self.specs[0].dtype

    @property
    def nbytes(self) -> int:
        """Size of the flat buffer in bytes, with the gaps that keep gradients aligned."""
        return sum(_padded(spec.nbytes) for spec in self.specs)

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of the variables, in packing order."""
        return [spec.name for spec in self.specs]

    @property
    def what(self) -> str:
        """Short description for warnings and errors."""
        more = f" and {len(self.specs) - 1} more" if len(self.specs) > 1 else ""
        return f"the gradient of {self.specs[0].name!r}{more}"

    @functools.cached_property
    def starts(self) -> list[int]:
        """Where each gradient begins in the flat buffer, in elements, in packing order."""
        sizes = [_padded(spec.nbytes) // self.dtype.itemsize for spec in self.specs]
        return [0, *itertools.accumulate(sizes[:-1])]

    def new_buffer(self) -> Array:
        """Allocate a flat buffer, aligned, with zeros in the gaps and room for a mark at its end.

        Returns:
          Array of shape [(nbytes + 64) / itemsize].
        """
        nbytes = self.nbytes + ALIGNMENT_BYTES
        raw = np.zeros(nbytes + ALIGNMENT_BYTES, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT_BYTES
        return raw[start : start + nbytes].view(self.dtype)

    def views(self, buffer: Array) -> list[Array]:
        """Each gradient's part of a flat buffer.

        Args:
          buffer: array from `new_buffer`.

        Returns:
          Views with the shapes of `specs`, in packing order.
        """
        return [
            buffer[start : start + math.prod(spec.shape)].reshape(spec.shape)
            for start, spec in zip(self.starts, self.specs)
        ]

    def pack(self, arrays: Sequence[Array], buffer: Array, limit: float = math.inf) -> bool:
        """Copy gradients into a flat buffer.

        Args:
          arrays: arrays with the shapes of `specs`, in packing order.
          buffer: array from `new_buffer`.
          limit: how large values are expected to be.

        Returns:
          Whether all of them are within the limit, as `all_within` finds.
        """
        within = True
        for view, array in zip(self.views(buffer), arrays):
            flat, values = view.reshape(-1), np.asarray(array).reshape(-1)
            for start in range(0, flat.size, PIECE):
                piece = flat[start : start + PIECE]
                np.copyto(piece, values[start : start + PIECE])
                within = all_within(piece, limit) and within  # while it is in the cache
        return within


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Group gradients into buckets.

    Args:
      specs: the gradients, in variable order.
      bucket_bytes: size that a bucket may not exceed, unless one gradient alone does.

    Returns:
      Buckets of one dtype each, in the order in which backward fills them.
    """
    groups: list[list[int]] = []
    open_group: dict[str, list[int]] = {}
    filled_bytes: dict[str, int] = {}
    for index in reversed(range(len(specs))):
        dtype, nbytes = specs[index].dtype.name, _padded(specs[index].nbytes)
        if dtype not in open_group or filled_bytes[dtype] + nbytes > bucket_bytes:
            open_group[dtype], filled_bytes[dtype] = [], 0
            groups.append(open_group[dtype])
        open_group[dtype].append(index)
        filled_bytes[dtype] += nbytes
    groups.sort(key=lambda group: group[-1], reverse=True)  # a bucket is full with its last part
    return tuple(Bucket(tuple(group), tuple(specs[i] for i in group)) for group in groups)


def title(buckets: Sequence[Bucket], index: int) -> str:
    """Describe one bucket of a plan.

    Args:
      buckets: the plan.
      index: which one.

    Returns:
      Text for warnings and errors.
    """
    return f"{buckets[index].what} (bucket {index + 1}/{len(buckets)})"


class BufferPool:
    """Flat buffers of one bucket, handed out again once nobody holds a view of them.

    TensorFlow may keep a reduced gradient, or a user fetch it, long after the step: a buffer is
    free only when its reference count says so.

    Args:
      bucket: the bucket whose buffers these are.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._buffers: list[Array] = []

    def take(self) -> Array:
        """Return a buffer that nobody uses.

        Returns:
          Array from `Bucket.new_buffer`; old values, zeros in the gaps.
        """
        for index in unused(self._buffers):
            return self._buffers[index]
        self._buffers.append(self._bucket.new_buffer())
        return self._buffers[-1]


def unused(buffers: Sequence[Array]) -> list[int]:
    """Which buffers nobody holds.

    Args:
      buffers: arrays that are views of one array each, and are held by this sequence alone.

    Returns:
      Indices of those without other views.
    """
    # a buffer is held by the sequence and getrefcount's argument; its memory, which every view
    # holds, by the buffer and getrefcount's argument
    return [
        index
        for index in range(len(buffers))
        if sys.getrefcount(buffers[index]) == 2 and sys.getrefcount(buffers[index].base) == 2
    ]


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
