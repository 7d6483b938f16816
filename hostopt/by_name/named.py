"""Collectives that the ranks match by name, in any order.

Each name has its own channel, so calls of different names never wait for each other: no rank
has to coordinate their order. Threads may make calls at the same time, in another order on each
rank. Calls of one name are matched in their order.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from hostopt.by_name.join import Announcement, Joining, refusal
from hostopt.collectives.call import Array, CollectiveCall, bytes_of
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.reduce_op import ReduceOp, check_dtype, mean_of_integers
from hostopt.collectives.wire_format import WireFormat, new_wire_format
from hostopt.errors import ConfigError
from hostopt.process import descriptors

_log = logging.getLogger(__name__)

_KIND = "call"  # of the names that `Joining` knows
# Shared memory of a name takes a file descriptor, and about 0.5 MiB of /dev/shm for two ranks. A
# program has some hundred names, unless they hold the number of a step.
MAX_IN_MEMORY = 1000


class NamedChannel:
    """The channel of one name, with a lock that is held during a call."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.lock = threading.Lock()
        self._wire_format = functools.cache(new_wire_format)  # which is not shared with others

    def all_reduce(
        self, arrays: Sequence[Array], name: str, op: ReduceOp, compression: str | None
    ) -> list[Array]:
        """Reduces arrays of one dtype together; see `NamedCollectives.all_reduce`."""
        flat: Array = np.concatenate([array.reshape(-1) for array in arrays])
        if len(arrays) == 1:
            described, signed = name, arrays[0]
        else:
            described, signed = describe_list(name, arrays), flat
        kind = f"all_reduce({op.value}{f' as {compression}' if compression else ''})"
        call = self.communicator.signed_call(kind, described, signed)
        flat = self._reduce(flat, op, call, self._wire_format(compression))
        ends = np.cumsum([array.size for array in arrays])
        return [
            flat[end - array.size : end].reshape(array.shape) for array, end in zip(arrays, ends)
        ]

    def reduce_scatter(self, array: Array, name: str, op: ReduceOp) -> Array:
        """Reduces an array; see `NamedCollectives.reduce_scatter`."""
        communicator, size = self.communicator, self.communicator.size
        is_even = len(array) % size == 0
        if is_even and not communicator.on_one_host and not _averages_integers(op, array.dtype):
            chunk = communicator.reduce_scatter(array, op, name)
            return chunk.reshape(len(array) // size, *array.shape[1:])
        # the ring's chunks do not end with rows, and shared memory has the whole result anyway
        call = communicator.signed_call(f"reduce_scatter({op.value})", name, array)
        result = self._reduce(array.flatten(), op, call).reshape(array.shape)
        return np.array_split(result, size)[communicator.rank].copy()

    def _reduce(
        self,
        flat: Array,
        op: ReduceOp,
        call: CollectiveCall,
        wire_format: WireFormat | None = None,
    ) -> Array:
        """Reduces an array, which is overwritten; averages of integers are truncated."""
        if not _averages_integers(op, flat.dtype):
            self.communicator.all_reduce_in_place(flat, op, call, wire_format)
            return flat
        total = flat.astype(np.int64)  # sums of small ones would wrap around
        self.communicator.all_reduce_in_place(total, ReduceOp.SUM, call)
        return mean_of_integers(total, self.communicator.size).astype(flat.dtype)


def _averages_integers(op: ReduceOp, dtype: np.dtype[Any]) -> bool:
    return op is ReduceOp.AVERAGE and dtype.kind in "iu"


def describe_list(name: str, arrays: Sequence[Array]) -> str:
    """Describes a list of arrays; the text is part of the signature that ranks compare."""
    shapes = ", ".join(f"{_dtype_name(array.dtype)}{list(array.shape)}" for array in arrays)
    return f"'{name}' ({len(arrays)} arrays: {shapes})"


@functools.cache  # numpy computes it anew each time
def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name


class NamedCollectives:
    """Collectives over the ranks of a communicator, matched by name.

    Every collective raises HostOptError if a rank failed, left or timed out, if two ranks call
    different collectives, dtypes or shapes under one name, and if two threads of this rank use
    one name at the same time.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator  # its own channel is not used
        self.rank, self.size = communicator.rank, communicator.size
        self.joining = Joining(communicator)
        self.joining.replay_with(_KIND, lambda announcement: _take_part(self, announcement))
        self._channels: dict[str, NamedChannel] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def all_reduce(
        self,
        arrays: Sequence[Array],
        name: str,
        op: ReduceOp = ReduceOp.SUM,
        compression: str | None = None,
    ) -> list[Array]:
        """Reduces arrays over the ranks. Arrays of one dtype travel together.

        Averages of integers are truncated towards zero. Compression sends float32 with 16 bits
        between hosts, if `op` is SUM or AVERAGE; other arrays are sent unchanged.
        """
        arrays = [np.asarray(array) for array in arrays]
        for array in arrays:
            check_dtype(array.dtype)
        results = list(arrays)
        if not arrays:
            return results
        with self._using(
            name, "all_reduce", arrays, op=op.name, compression=compression
        ) as channel:
            for dtype in dict.fromkeys(array.dtype for array in arrays):
                indices = [i for i, array in enumerate(arrays) if array.dtype == dtype]
                chosen = [arrays[i] for i in indices]
                can_compress = dtype == np.float32 and op.ufunc is np.add
                reduced = channel.all_reduce(
                    chosen, name, op, compression if can_compress else None
                )
                for index, array in zip(indices, reduced):
                    results[index] = array
        return results

    def all_gather(
        self, array: Array, name: str, rows_by_rank: Sequence[int] | None = None
    ) -> Array:
        """Joins the arrays of all ranks along the first dimension.

        If `rows_by_rank` is known, a rank that has joined has so many rows of zeros; otherwise it
        has none.
        """
        array = _rows(array, "all_gather")
        with self._using(name, "all_gather", [array], rows_by_rank=rows_by_rank) as channel:
            description = _describe_rows("all_gather", name, array)
            is_empty = 0 in array.shape[1:]  # then the number of bytes is the number of rows
            data = np.zeros(len(array), np.uint8) if is_empty else bytes_of(array)
            parts = channel.communicator.all_gather_bytes(data, description)
            if is_empty:
                return np.empty((sum(map(len, parts)), *array.shape[1:]), array.dtype)
            rows = [np.frombuffer(part, array.dtype) for part in parts]
            return np.concatenate(rows).reshape(-1, *array.shape[1:])

    def broadcast(self, arrays: Sequence[Array], root: int, name: str) -> list[Array]:
        """Sends the arrays of one rank, of any fixed-size dtype, to all ranks."""
        root = int(root)
        if not 0 <= root < self.size:
            raise ConfigError(
                f"broadcast of {name!r} has the root {root}, wanted a rank from 0 to "
                f"{self.size - 1}. Give one of these"
            )
        arrays = [_fixed_size(array, "broadcast") for array in arrays]
        with self._using(name, "broadcast", arrays, root=root) as channel:
            communicator = channel.communicator
            if len(arrays) == 1:
                return [communicator.broadcast(arrays[0], root, name)]
            packed = np.concatenate([bytes_of(array) for array in arrays])
            packed = communicator.broadcast(packed, root, describe_list(name, arrays))
        ends = np.cumsum([array.nbytes for array in arrays])
        return [
            packed[end - array.nbytes : end].copy().view(array.dtype).reshape(array.shape)
            for array, end in zip(arrays, ends)
        ]

    def reduce_scatter(self, array: Array, name: str, op: ReduceOp = ReduceOp.SUM) -> Array:
        """Reduces an array over the ranks. Each rank gets a part of the rows, in rank order.

        The first ranks get one row more if the rows cannot be divided evenly. Averages of integers
        are truncated towards zero.
        """
        array = _rows(array, "reduce_scatter")
        check_dtype(array.dtype)
        with self._using(name, "reduce_scatter", [array], op=op.name) as channel:
            return channel.reduce_scatter(array, name, op)

    def all_to_all(self, array: Array, splits: Sequence[int], name: str) -> tuple[Array, Array]:
        """Sends a part of the rows of each rank to each rank.

        `splits` has the number of rows for each rank. Returns the rows that this rank has
        received, in rank order, and their number by rank.
        """
        array = _rows(array, "all_to_all")
        splits = [int(each) for each in splits]
        if len(splits) != self.size or sum(splits) != len(array) or min(splits) < 0:
            raise ConfigError(
                f"all_to_all of {name!r} has the splits {splits} of {len(array)} rows, wanted "
                f"{self.size} numbers whose sum is {len(array)}. Give one for each rank"
            )
        parts = np.split(array, np.cumsum(splits)[:-1])
        with self._using(name, "all_to_all") as channel:
            communicator = channel.communicator
            description = _describe_rows("all_to_all", name, array)
            call = communicator.begin_call("all_to_all", description)
            group = communicator.group(call)
            counts = group.all_gather(call, np.array(splits, np.int64))
            received = counts[:, self.rank].copy()
            result = np.empty((int(received.sum()), *array.shape[1:]), array.dtype)
            slots = np.split(result, np.cumsum(received)[:-1])
            group.exchange(
                call._replace(bucket=1),
                list(map(bytes_of, parts)),
                list(map(bytes_of, slots)),
                int(counts.max()) * array.itemsize * math.prod(array.shape[1:]),
            )
            return result, received

    def all_gather_bytes(self, data: bytes, name: str) -> list[bytes]:
        """Gathers byte strings of any length on every rank, in rank order."""
        with self._using(name, "all_gather_bytes") as channel:
            return channel.communicator.all_gather_bytes(data, name)

    def barrier(self, name: str) -> None:
        """Waits until every rank has called this."""
        with self._using(name, "barrier") as channel:
            channel.communicator.barrier(name)

    def refuse(self, name: str, error: ConfigError) -> None:
        """Makes all ranks fail that make a call which this rank refuses; it counts as a call."""
        if self.size > 1 and not self._is_closed and self.communicator.transport.error is None:
            self._channel_of(name).communicator.refuse(f"the call {name!r}: {error.message}")

    def close(self) -> None:
        """Refuses further calls."""
        self._is_closed = True

    def check_open(self) -> None:
        """Raises ConfigError after `close`, and the error of the ring if it is aborted."""
        if self._is_closed:
            raise ConfigError(
                "a collective of a ring that this process has left is called, such as one in a "
                "function that was traced before shutdown(). Trace the function again after init()"
            )
        error = self.communicator.transport.error
        if error is not None:  # data that have arrived may belong to a call that was given up
            raise error

    @contextlib.contextmanager
    def _using(
        self, name: str, collective: str, arrays: Sequence[Array] = (), **details: Any
    ) -> Iterator[NamedChannel]:
        self.check_open()
        channel = self._channel_of(name)
        if not channel.lock.acquire(blocking=False):
            raise ConfigError(
                f"rank {self.rank} makes two calls named {name!r} at the same time, which other "
                "ranks cannot tell apart. Give each its own name"
            )
        try:
            self.joining.begin(
                _KIND,
                name,
                lambda: {"collective": collective, "arrays": describe_arrays(arrays), **details},
            )
            try:
                yield channel
            finally:
                self.joining.end(_KIND, name)
        finally:
            channel.lock.release()

    def _channel_of(self, name: str) -> NamedChannel:
        with self._lock:
            if name not in self._channels:
                self._channels[name] = self._open_channel(name)
            return self._channels[name]

    def _open_channel(self, name: str) -> NamedChannel:
        communicator, count = self.communicator.duplicate(name), len(self._channels)
        most = min(MAX_IN_MEMORY, descriptors.limit() // 2)
        must_share = communicator.transport.options.communication == "shm"
        if communicator.memory is not None:
            communicator.memory.is_declined = count >= most and not must_share
        if count == most:
            _log.warning(
                "rank %d has used %d names of collectives, and now %r. Each takes memory until "
                "shutdown(): give a call the same name in each step, without the step's number",
                *(self.rank, count, name),
            )
        return NamedChannel(communicator)


def _take_part(named: NamedCollectives, announcement: Announcement) -> None:
    """Makes a call of other ranks with values that change nothing."""
    name, details = announcement.name, announcement.details
    collective, root = details["collective"], details.get("root")
    if collective in ("all_to_all", "all_gather_bytes") or root == named.rank:
        raise refusal(
            announcement,
            named.communicator.transport.cluster,
            f"calls {collective} of {name!r}",
            "and has nothing to send. Make this call before join()",
        )
    op = ReduceOp[details.get("op", "SUM")]
    rows_by_rank = details.get("rows_by_rank")
    rows = 0 if rows_by_rank is None else rows_by_rank[named.rank]
    arrays = neutral_arrays(details["arrays"], op, rows if collective == "all_gather" else None)
    if collective == "all_reduce":
        named.all_reduce(arrays, name, op, details["compression"])
    elif collective == "all_gather":
        named.all_gather(arrays[0], name)
    elif collective == "broadcast":
        named.broadcast(arrays, details["root"], name)
    elif collective == "reduce_scatter":
        named.reduce_scatter(arrays[0], name, op)
    else:
        named.barrier(name)


def _describe_rows(kind: str, name: str, array: Array) -> str:
    """Describes an array whose number of rows may differ between ranks."""
    shape = ", ".join(["?", *map(str, array.shape[1:])])
    return f"'{name}' ({kind} of {array.dtype.name}[{shape}])"


def _fixed_size(array: Array, kind: str) -> Array:
    array = np.asarray(array, order="C")
    if array.dtype.hasobject:
        raise ConfigError(
            f"{kind} has an array of Python objects or strings, wanted numbers. Use "
            "broadcast_object or allgather_object"
        )
    return array


def _rows(array: Array, kind: str) -> Array:
    array = _fixed_size(array, kind)
    if not array.ndim:
        raise ConfigError(
            f"{kind} has a scalar, wanted an array with a first dimension. Reshape it to [1]"
        )
    return array


# -- values that change nothing --------------------------------------------------------------


def describe_arrays(arrays: Sequence[Array]) -> list[tuple[str, tuple[int, ...]]]:
    """Returns dtypes and shapes of arrays, in types that JSON supports."""
    # ml_dtypes' types by name, all others by numpy's code
    dtypes = [array.dtype for array in arrays]
    names = [each.name if hasattr(ml_dtypes, each.name) else each.str for each in dtypes]
    return [(name, array.shape) for name, array in zip(names, arrays)]


def neutral_arrays(
    described: Sequence[tuple[str, Sequence[int]]], op: ReduceOp, rows: int | None = None
) -> list[Array]:
    """Returns arrays like those described that do not change the results of a reduction.

    An AVERAGE counts them as zeros. `rows` is their number of rows, if it is another.
    """
    arrays = []
    for name, shape in described:
        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name, name))
        own_shape = shape if rows is None else [rows, *shape[1:]]
        arrays.append(np.full(own_shape, neutral_value(dtype, op), dtype))
    return arrays


def neutral_value(dtype: np.dtype[Any], op: ReduceOp) -> Any:
    """Returns the value that does not change the result of an operator."""
    if op is ReduceOp.PRODUCT:
        return 1
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return np.zeros((), dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.max if op is ReduceOp.MIN else limits.min
    return np.inf if op is ReduceOp.MIN else -np.inf
