"""The channel of one name, and its all-reduce of arrays that travel together."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from hostopt.collectives.call import Array
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.reduce_op import ReduceOp, mean_of_integers
from hostopt.collectives.wire_format import WireFormat, new_wire_format
from hostopt.process import descriptors

_log = logging.getLogger(__name__)

# Shared memory of a name takes a file descriptor, and about 0.5 MiB of /dev/shm for two ranks. A
# program has some hundred names, unless they hold the number of a step.
MAX_IN_MEMORY = 1000


class NamedChannel:
    """The channel of one name, with a lock that is held during a call."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.lock = threading.Lock()
        self._wire_formats: dict[str, WireFormat] = {}

    def all_reduce(
        self, arrays: Sequence[Array], name: str, op: ReduceOp, compression: str | None
    ) -> list[Array]:
        """Reduces arrays of one dtype together; see `NamedCollectives.all_reduce`."""
        communicator = self.communicator
        flat: Array
        if len(arrays) == 1:
            flat = np.array(arrays[0], order="C").reshape(-1)
            call = communicator.signed_call(_kind(op, compression), name, arrays[0])
        else:
            flat = np.concatenate([array.reshape(-1) for array in arrays])
            description = describe_list(name, arrays)
            call = communicator.signed_call(_kind(op, compression), description, flat)
        scale, wire_format, dtype = 1, None, flat.dtype
        averages_integers = _averages_integers(op, dtype)
        if averages_integers:
            op, flat = ReduceOp.SUM, flat.astype(np.int64)  # sums of small ones would wrap around
        elif compression is not None and op is ReduceOp.AVERAGE:
            op, scale = ReduceOp.SUM, self.communicator.size
        if compression is not None:
            wire_format = self._wire_formats.get(compression) or new_wire_format(compression)
            assert wire_format is not None
            self._wire_formats[compression] = wire_format
        communicator.all_reduce_in_place(flat, op, call, wire_format)
        if scale != 1:
            flat /= flat.dtype.type(scale)
        if averages_integers:
            flat = mean_of_integers(flat, communicator.size).astype(dtype)
        ends = np.cumsum([array.size for array in arrays])
        return [
            flat[end - array.size : end].reshape(array.shape) for array, end in zip(arrays, ends)
        ]

    def reduce_scatter(self, array: Array, name: str, op: ReduceOp) -> Array:
        """Reduces an array; see `NamedCollectives.reduce_scatter`."""
        communicator, size = self.communicator, self.communicator.size
        averages_integers = _averages_integers(op, array.dtype)
        if len(array) % size == 0 and not communicator.on_one_host and not averages_integers:
            chunk = communicator.reduce_scatter(array, op, name)
            return chunk.reshape(len(array) // size, *array.shape[1:])
        # the ring's chunks do not end with rows, and shared memory has the whole result anyway
        call = communicator.signed_call(f"reduce_scatter({op.value})", name, array)
        result = np.array(array, np.int64 if averages_integers else None, order="C")
        op = ReduceOp.SUM if averages_integers else op
        communicator.all_reduce_in_place(result.reshape(-1), op, call)
        rows: Array = np.array_split(result, size)[communicator.rank].copy()
        return mean_of_integers(rows, size).astype(array.dtype) if averages_integers else rows

    def refuse(self, reason: str) -> None:
        """Counts a call that this rank refuses, and tells ranks that wait for it."""
        self.communicator.refuse(reason)


def open_channel(communicator: Communicator, name: str, count: int) -> NamedChannel:
    """Opens the channel of a name. Beyond a number of names, channels take no shared memory.

    Args:
      count: number of names that have a channel.
    """
    communicator = communicator.duplicate(name)
    most = min(MAX_IN_MEMORY, descriptors.limit() // 2)
    must_share = communicator.transport.options.communication == "shm"
    if communicator.memory is not None:
        communicator.memory.is_declined = count >= most and not must_share
    if count == most:
        _log.warning(
            "rank %d has used %d names of collectives, and now %r. Each takes memory until "
            "shutdown(): give a call the same name in each step, without the step's number",
            *(communicator.rank, count, name),
        )
    return NamedChannel(communicator)


def _averages_integers(op: ReduceOp, dtype: np.dtype[Any]) -> bool:
    return op is ReduceOp.AVERAGE and dtype.kind in "iu"


def _kind(op: ReduceOp, compression: str | None) -> str:
    return f"all_reduce({op.value}{f' as {compression}' if compression else ''})"


def describe_list(name: str, arrays: Sequence[Array]) -> str:
    """Describes a list of arrays; the text is part of the signature that ranks compare."""
    shapes = ", ".join(f"{_dtype_name(array.dtype)}{list(array.shape)}" for array in arrays)
    return f"'{name}' ({len(arrays)} arrays: {shapes})"


@functools.cache  # numpy computes it anew each time
def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name
