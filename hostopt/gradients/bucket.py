"""Tensor fusion: assigns gradients to buckets, and packs those of a bucket into a buffer."""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.finite import PIECE, all_within
from hostopt.collectives.ring_schedule import chunk_slices
from hostopt.collectives.shared_memory import SharedMemoryChannel

# TensorFlow uses an array without copying it if the array is aligned to this many bytes. No vector
# of a processor is longer.
ALIGNMENT_BYTES = 64
_MAX_SLOTS = 64  # bits of the free mask of `SharedSlots`


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of a gradient."""

    name: str  # of its variable
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
    """Gradients of one dtype that are reduced as one flat buffer."""

    indices: tuple[int, ...]  # of the gradients in variable order, listed in packing order
    specs: tuple[TensorSpec, ...]  # in packing order
    chunk_count: int = 1  # the flat buffer has so many aligned chunks of the same size
    unit_bytes: int = ALIGNMENT_BYTES  # no chunk ends within a unit of a gradient

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Dtype of all gradients in the bucket."""
        return self.specs[0].dtype

    @property
    def nbytes(self) -> int:
        """Size of the packed gradients in bytes, including padding for alignment."""
        return sum(padded(spec.nbytes, self.unit_bytes) for spec in self.specs)

    @property
    def buffer_bytes(self) -> int:
        """Size of a buffer in bytes; at least `ALIGNMENT_BYTES` follow the last gradient."""
        return padded(self.nbytes + ALIGNMENT_BYTES, self.chunk_count * self.unit_bytes)

    @functools.cached_property
    def names(self) -> list[str]:
        """Names of the variables, in packing order."""
        return [spec.name for spec in self.specs]

    @property
    def name(self) -> str:
        """Short description, for warnings and errors."""
        more = f" and {len(self.specs) - 1} more" if len(self.specs) > 1 else ""
        return f"the gradient of {self.specs[0].name!r}{more}"

    @functools.cached_property
    def starts(self) -> list[int]:
        """Offset of each gradient in the flat buffer, in elements, in packing order."""
        units = [padded(spec.nbytes, self.unit_bytes) for spec in self.specs]
        sizes = [nbytes // self.dtype.itemsize for nbytes in units]
        return [0, *itertools.accumulate(sizes[:-1])]

    @functools.cached_property
    def chunks(self) -> list[slice]:
        """Chunks of the flat buffer: rank r reduces chunk r."""
        return chunk_slices(self.buffer_bytes // self.dtype.itemsize, self.chunk_count)

    def new_buffer(self) -> Array:
        """Allocates an aligned buffer of zeros, with space for a flag at its end."""
        return self.buffer_in(mmap.mmap(-1, self.buffer_bytes))

    def buffer_in(self, memory: Any) -> Array:
        """Returns a buffer in aligned memory of `buffer_bytes`."""
        # a view of its own base array, as `free_buffers` expects
        return np.frombuffer(memory, np.uint8).view(self.dtype)

    @functools.cached_property
    def parts(self) -> list[list[slice]]:
        """The elements of each gradient, in packing order, that each chunk contains."""
        return [
            [
                _within(chunk, start, math.prod(spec.shape))
                for start, spec in zip(self.starts, self.specs)
            ]
            for chunk in self.chunks
        ]

    def views(self, buffer: Array) -> list[Array]:
        """Splits a flat buffer into views with the shapes of `specs`, in packing order."""
        return [
            buffer[start : start + math.prod(spec.shape)].reshape(spec.shape)
            for start, spec in zip(self.starts, self.specs)
        ]

    def pack(self, arrays: Sequence[Array], buffer: Array, limit: float = math.inf) -> bool:
        """Packs gradients; returns True if no magnitude exceeds `limit`, as a NaN does."""
        within = True
        for view, array in zip(self.views(buffer), arrays):
            flat, values = view.reshape(-1), np.asarray(array).reshape(-1)
            for start in range(0, flat.size, PIECE):
                piece = flat[start : start + PIECE]
                np.copyto(piece, values[start : start + PIECE])
                within = all_within(piece, limit) and within  # the piece is still in cache
        return within


def plan_buckets(
    specs: Sequence[TensorSpec], bucket_bytes: int, chunk_count: int = 1
) -> tuple[Bucket, ...]:
    """Assigns gradients to buckets of one dtype each, as backward fills them."""
    groups: list[list[int]] = []
    open_group: dict[str, list[int]] = {}
    filled_bytes: dict[str, int] = {}
    for index in reversed(range(len(specs))):
        dtype, nbytes = specs[index].dtype.name, padded(specs[index].nbytes)
        if dtype not in open_group or filled_bytes[dtype] + nbytes > bucket_bytes:
            open_group[dtype], filled_bytes[dtype] = [], 0
            groups.append(open_group[dtype])
        open_group[dtype].append(index)
        filled_bytes[dtype] += nbytes
    # backward completes a bucket with its last gradient
    groups.sort(key=lambda group: group[-1], reverse=True)
    return tuple(
        Bucket(tuple(group), tuple(specs[i] for i in group), chunk_count) for group in groups
    )


class BufferPool:
    """Flat buffers of one bucket, reused when reference counts say that no view is alive."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.buffers: list[Array] = []

    def take(self) -> Array:
        """Returns a free buffer, or a new one. It holds old values, and zero padding."""
        return self.buffers[self.take_index()]

    def take_index(self, preferred: int = 0) -> int:
        """Returns the index of a free buffer, or of a new one."""
        free = free_buffers(self.buffers)
        if preferred in free:
            return preferred
        if not free:
            self.buffers.append(self._bucket.new_buffer())
            return len(self.buffers) - 1
        return free[0]


class SharedSlots:
    """Buffers of one bucket in memory that all ranks of one host share.

    A rank may reuse a slot if it holds no view of it. Before each use the ranks combine their
    masks of free slots, and take one that is free on all ranks. If there is none, they allocate
    another.
    """

    def __init__(
        self, communicator: Communicator, bucket: Bucket, channel_nbytes: int = 0
    ) -> None:
        """Makes no slot yet; `channel_nbytes` is the size of what passes through the channel."""
        assert communicator.memory is not None
        self._memory = communicator.memory
        self._bucket = bucket
        self._channel_nbytes = channel_nbytes
        self.slots: list[Array] = []
        self._can_allocate = True

    def take(
        self, call: CollectiveCall, preferred: int = 0
    ) -> tuple[SharedMemoryChannel, int] | None:
        """Returns the channel of the ranks, and the index of a slot that is free on all.

        Collective: all ranks must call it. Then they must reach a barrier, unless it returns None:
        no memory is left.
        """
        channel = self._memory.channel_of_all(self._channel_nbytes)
        if channel is None:
            return None
        free_mask = sum(1 << index for index in free_buffers(self.slots))
        free_mask = channel.counters.all_reduce_band(free_mask, call)
        if free_mask >> preferred & 1:
            return channel, preferred
        if free_mask:
            return channel, (free_mask & -free_mask).bit_length() - 1  # lowest set bit
        return (channel, len(self.slots) - 1) if self._allocate_slot() else None

    def _allocate_slot(self) -> bool:
        """Allocates a slot on all ranks. After a failure it is not tried again."""
        if self._can_allocate and len(self.slots) < _MAX_SLOTS:
            memory = self._memory.allocate(self._bucket.buffer_bytes)
            self._can_allocate = memory is not None
            if memory is not None:
                self.slots.append(self._bucket.buffer_in(memory))
                return True
        return False


def free_buffers(buffers: Sequence[Array]) -> list[int]:
    """Finds buffers that only this sequence refers to; each is a view of its own base array."""
    # A free buffer has two references: the sequence, and the argument of getrefcount. Every view
    # refers to the base array, so a free base array has two as well: the buffer and the argument.
    return [
        index
        for index in range(len(buffers))
        if sys.getrefcount(buffers[index]) == 2 and sys.getrefcount(buffers[index].base) == 2
    ]


def uncounted(buffer: Array) -> Array:
    """Returns an array in the memory of a buffer that does not keep the buffer from being free."""
    base: Any = buffer.base
    return np.frombuffer(base.base, buffer.dtype)


def padded(nbytes: int, unit: int = ALIGNMENT_BYTES) -> int:
    """Returns the next multiple of a unit."""
    return -(-nbytes // unit) * unit


def _within(chunk: slice, start: int, size: int) -> slice:
    """Returns the elements of a gradient at `start` that a chunk of the flat buffer contains."""
    begin, end = (min(max(edge - start, 0), size) for edge in (chunk.start, chunk.stop))
    return slice(begin, end)
