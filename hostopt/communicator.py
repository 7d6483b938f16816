"""What a user of hostopt holds: collectives over arrays, in the same order on every rank."""

from __future__ import annotations

import enum
import functools
import itertools
import json
import logging
import threading
from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from hostopt import ring
from hostopt.compression import WireFormat
from hostopt.errors import CollectiveMismatchError, ConfigError
from hostopt.hierarchy import Hierarchy, open_hierarchy, share_memory
from hostopt.hosts import Hosts
from hostopt.lane import Lane, Source
from hostopt.ring import Array, Operation
from hostopt.transport import event_loop
from hostopt.transport.base import FINISH_CHANNEL, Tag, Transport
from hostopt.transport.signature import UNSIGNED, signature_of

__all__: list[str] = []

_log = logging.getLogger(__name__)

# Blocks of shared memory: arrays up to the smaller one go through a lane that takes less memory.
SMALL_BLOCK_BYTES, BLOCK_BYTES = 64 << 10, 1 << 20
_SHOWN_NAMES = 20  # of those that differ between ranks
DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64")


class ReduceOp(enum.Enum):
    """How the values of the ranks become one."""

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"

    @property
    def ufunc(self) -> np.ufunc:
        """The numpy function of two arrays; an average is a sum that is divided at the end."""
        return _UFUNCS[self]


_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVERAGE: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


class Communicator:
    """Collectives over the ranks of one transport, on a channel of their own.

    Every rank makes the same calls in the same order on one communicator. Threads that work at
    the same time each use a `duplicate`, and so do calls whose order differs by rank.

    Args:
      transport: this rank's transport.
      channel: number of the channel; 0 for the first communicator of a transport.
      what: what this channel carries, for warnings and errors.
      hosts: which ranks share memory, to all-reduce in it; None for gRPC alone.
    """

    def __init__(
        self, transport: Transport, channel: int = 0, what: str = "", hosts: Hosts | None = None
    ) -> None:
        self.transport = transport
        self.channel = channel
        self.what = what
        self.hosts = hosts
        self._steps = itertools.count()
        self._lock = threading.Lock()
        self._hierarchies: dict[int, Hierarchy | None] = {}  # by size of block
        if hosts is not None:
            opening = transport.open_channel(f"the shared memory of channel {channel}")
            self._opening = Communicator(transport, opening, what)

    @property
    def rank(self) -> int:
        """This rank, 0..size-1."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.transport.size

    @property
    def on_one_host(self) -> bool:
        """True where all ranks share memory, so that nothing travels."""
        return self.hosts is not None and len(self.hosts.groups) == 1

    def duplicate(self, what: str = "") -> Communicator:
        """Open another channel over the same ranks, which finds its peers by its name.

        Args:
          what: name of what the channel carries. Ranks may open channels of different names in
            different orders, those of one name, or of none, in the same order.

        Returns:
          A communicator whose messages never mix with this one's.

        Raises:
          ConfigError: the name has the number of another one.
        """
        return Communicator(self.transport, self.transport.open_channel(what), what, self.hosts)

    def all_reduce(self, array: Any, op: ReduceOp = ReduceOp.SUM, what: str = "") -> Array:
        """Reduce over the ranks; every rank gets the result, with the same bits.

        Args:
          array: array of any shape, one of `DTYPES`, the same shape and dtype on all ranks.
          op: how to reduce; AVERAGE needs a floating dtype.
          what: what is reduced, for warnings and errors.

        Returns:
          A new array like `array`.

        Raises:
          ConfigError: a dtype that is not supported.
          HostOptError: a rank failed, left or timed out.
        """
        result = _copy(array)
        operation = self._call(f"all_reduce({op.value})", what, result)
        self.all_reduce_in_place(result.reshape(-1), op, operation)
        return result

    def all_reduce_in_place(
        self,
        flat: Array,
        op: ReduceOp,
        operation: Operation,
        wire_format: WireFormat | None = None,
        source: Source | None = None,
    ) -> None:
        """`all_reduce` of a contiguous array of shape [n] into itself, or of a source into it.

        Args:
          flat: array of shape [n], one of `DTYPES`.
          op: how to reduce.
          operation: which call this is, from `operation`; signed by what is reduced, unless its
            signature is known already.
          wire_format: how the values travel, for a SUM of float32; None sends them as they are.
          source: this rank's values, where they lie in other arrays than `flat`.

        Raises:
          ConfigError: a wire format for what is no SUM of float32.
          HostOptError: as in `all_reduce`.
        """
        _check_dtype(flat.dtype, op)
        if wire_format is not None and (op is not ReduceOp.SUM or flat.dtype != np.float32):
            raise ConfigError(
                f"{op.name} of {flat.dtype.name} cannot travel as {wire_format.name}, only a SUM "
                "of float32 can"
            )
        if operation.signature is UNSIGNED:
            operation = _signed(operation, op, flat, wire_format)
        self.begin(operation)
        hierarchy = self._hierarchy(flat.nbytes, operation.signature.text)
        if hierarchy is not None:
            hierarchy.all_reduce(flat, op.ufunc, operation, wire_format, source)
        else:
            if source is not None:
                source.copy_to(flat)
            ring.all_reduce(self.transport, operation, flat, op.ufunc, (), wire_format)
        if op is ReduceOp.AVERAGE:
            np.divide(flat, flat.dtype.type(self.size), out=flat)

    def open_lane(self, nbytes: int = 0, what: str = "") -> Lane | None:
        """The memory in which all ranks meet; all ranks call this together.

        Args:
          nbytes: size of the arrays that go through it.
          what: for what it is opened, the same on all ranks.

        Returns:
          This channel's lane for such arrays; None where the ranks share no memory.

        Raises:
          HostOptError: a rank failed, left or timed out.
        """
        hierarchy = self._hierarchy(nbytes, what or self.what) if self.on_one_host else None
        return hierarchy.lane if hierarchy is not None else None

    def share_memory(self, nbytes: int) -> memoryview | None:
        """New memory that all ranks of one host share; all ranks call this together.

        Args:
          nbytes: its size.

        Returns:
          Zeros; None where there is not so much left, as a warning says.

        Raises:
          HostOptError: a rank failed, left or timed out.
        """
        assert self.hosts is not None
        memory, trouble = share_memory(self._opening, self.hosts, nbytes)
        if trouble and self.rank == 0:
            _log.warning("%s: no memory to share: %s", self.what, trouble)
        return memory

    def _hierarchy(self, nbytes: int, what: str) -> Hierarchy | None:
        """The lanes for arrays of this size, which all ranks open at their first use."""
        if self.hosts is None:
            return None
        block_bytes = SMALL_BLOCK_BYTES if nbytes <= SMALL_BLOCK_BYTES else BLOCK_BYTES
        if block_bytes not in self._hierarchies:
            opened = open_hierarchy(self._opening, self.hosts, block_bytes, what)
            self._hierarchies[block_bytes] = opened
        return self._hierarchies[block_bytes]

    def reduce_scatter(self, array: Any, op: ReduceOp = ReduceOp.SUM, what: str = "") -> Array:
        """Reduce over the ranks; rank r gets chunk r of the flattened result.

        Args:
          array: array of any shape, one of `DTYPES`, the same shape and dtype on all ranks.
          op: how to reduce; AVERAGE needs a floating dtype.
          what: what is reduced, for warnings and errors.

        Returns:
          A new array of shape [k]; the lengths of two ranks differ by one at most.

        Raises:
          ConfigError: a dtype that is not supported.
          HostOptError: a rank failed, left or timed out.
        """
        array = _copy(array)
        flat = array.reshape(-1)
        _check_dtype(flat.dtype, op)
        operation = self._call(f"reduce_scatter({op.value})", what, array)
        self.begin(operation)
        rounds = ring.reduce_scatter_schedule(self.rank, self.size)
        ring.run(self.transport, operation, flat, rounds, op.ufunc)
        chunk: Array = flat[ring.chunk_slices(flat.size, self.size)[self.rank]].copy()
        if op is ReduceOp.AVERAGE:
            chunk /= chunk.dtype.type(self.size)
        return chunk

    def all_gather(self, array: Any, what: str = "") -> Array:
        """Collect the array of every rank on every rank.

        Args:
          array: array of any shape and fixed-size dtype, the same on all ranks.
          what: what is collected, for warnings and errors.

        Returns:
          A new array of shape [size, ...]; row r is the array of rank r.

        Raises:
          HostOptError: a rank failed, left or timed out.
        """
        mine = _copy(array)
        return self._all_gather(mine, self._call("all_gather", what, mine))

    def _all_gather(self, mine: Array, operation: Operation) -> Array:
        self.begin(operation)
        result = np.empty((self.size, *mine.shape), mine.dtype)
        result[self.rank] = mine
        rounds = ring.all_gather_schedule(self.rank, self.size)
        ring.run(self.transport, operation, result.reshape(-1), rounds)
        return result

    def broadcast(self, array: Any, root: int = 0, what: str = "") -> Array:
        """Give every rank the array of one.

        Args:
          array: array of any shape and fixed-size dtype, the same on all ranks.
          root: rank whose values hold.
          what: what is sent, for warnings and errors.

        Returns:
          A new array like `array`, with the bits of rank `root`.

        Raises:
          ConfigError: `root` is not a rank.
          HostOptError: a rank failed, left or timed out.
        """
        if not 0 <= root < self.size:
            raise ConfigError(f"broadcast root is {root}, wanted a rank from 0 to {self.size - 1}")
        result = _copy(array)
        operation = self._call(f"broadcast from rank {root}", what, result)
        self.begin(operation)
        ring.broadcast(self.transport, operation, result.reshape(-1), root)
        return result

    @overload
    def all_gather_bytes(self, data: bytes, what: str = "") -> list[bytes]: ...

    @overload
    def all_gather_bytes(
        self, data: memoryview | Array, what: str = ""
    ) -> list[bytes | memoryview]: ...

    def all_gather_bytes(self, data: Any, what: str = "") -> Any:
        """Collect byte strings, which may differ in length, on every rank.

        Args:
          data: the bytes of this rank, or a contiguous buffer.
          what: what is collected, for warnings and errors.

        Returns:
          The bytes of each rank, in rank order; for a buffer, views of many bytes and of `data`
          itself, all read-only.

        Raises:
          HostOptError: a rank failed, left or timed out.
        """
        view = memoryview(data)
        view = view.cast("B").toreadonly() if view.nbytes else memoryview(b"")
        operation = self._call("all_gather_bytes", what)
        self.begin(operation)
        # the same lane whatever their lengths, which differ by rank; small blocks stay in cache
        lane = self.open_lane(0, operation.signature.text)
        if lane is not None:
            found = lane.all_gather_bytes(view, operation)
        else:
            found = ring.all_gather_bytes(self.transport, operation, view)
        if isinstance(data, bytes):
            found = [bytes(each) for each in found]
            found[self.rank] = data
        return found

    def gather_bytes(self, data: bytes, what: str = "") -> list[bytes]:
        """Collect byte strings, which may differ in length, on rank 0.

        Args:
          data: the bytes of this rank.
          what: what is collected, for warnings and errors.

        Returns:
          On rank 0 the bytes of each rank, in rank order; on the others nothing.

        Raises:
          HostOptError: a rank failed, left or timed out.
        """
        length = np.array(len(data), np.int64)
        lengths = self._all_gather(length, self._call("gather_bytes", what))
        operation = self._call("gather_bytes", what)
        if self.rank != 0:
            ring.send(self.transport, operation, np.frombuffer(data, np.uint8), 0)
            return []
        collected = [data]
        for peer in range(1, self.size):
            flat = np.empty(int(lengths[peer]), np.uint8)
            ring.receive(self.transport, operation, flat, peer)
            collected.append(flat.tobytes())
        return collected

    def scatter_bytes(self, data: Sequence[bytes], what: str = "") -> bytes:
        """Give each rank a byte string of its own, which rank 0 has.

        Args:
          data: on rank 0 the bytes of each rank, in rank order; on the others nothing.
          what: what is given, for warnings and errors.

        Returns:
          The bytes of this rank.

        Raises:
          HostOptError: a rank failed, left or timed out.
        """
        own = [len(each) for each in data] if self.rank == 0 else [0] * self.size
        lengths, operation = np.array(own, np.int64), self._call("scatter_bytes", what)
        self.begin(operation)
        ring.broadcast(self.transport, operation, lengths, 0)
        operation = self._call("scatter_bytes", what)
        if self.rank != 0:
            flat = np.empty(int(lengths[self.rank]), np.uint8)
            ring.receive(self.transport, operation, flat, 0)
            return flat.tobytes()
        for peer in range(1, self.size):
            ring.send(self.transport, operation, np.frombuffer(data[peer], np.uint8), peer)
        return data[0]

    def barrier(self, what: str = "barrier") -> None:
        """Return once every rank has called this.

        Args:
          what: what the barrier is for, for warnings and errors.

        Raises:
          HostOptError: a rank failed, left or timed out.
        """
        operation = self._call("barrier", what)
        self.all_reduce_in_place(np.zeros(1, np.int32), ReduceOp.SUM, operation)

    def finish(self, what: str = "the end of training") -> None:
        """`barrier` that also tells a rank which still waits for this one's data that none comes.

        Args:
          what: what has ended, for warnings and errors.

        Raises:
          HostOptError: a rank failed, left, timed out, or had more to do than this one.
        """
        if self.size == 1:
            return
        operation = self._call("finish", what)._replace(channel=FINISH_CHANNEL)
        self.begin(operation)
        marker = Tag(FINISH_CHANNEL, operation.step, bucket=1)
        for peer in self._waiting_peers():
            event_loop.run(self.transport.send(peer, marker, b"", what))
        ring.all_reduce(self.transport, operation, np.zeros(1, np.int32))
        self.transport.mailbox.resume(operation.step)

    def _waiting_peers(self) -> set[int]:
        """Whoever may wait for data of this rank: the next one, and in memory the whole host."""
        peers = {(self.rank + 1) % self.size}
        if self.hosts is not None:
            leaders = self.hosts.leaders
            peers.update(self.hosts.members(self.rank))
            if self.rank in leaders:
                peers.add(leaders[(leaders.index(self.rank) + 1) % len(leaders)])
        return peers - {self.rank}

    def check_same(self, facts: dict[str, str], what: str) -> list[str]:
        """Make sure that all ranks hold the same facts, in whatever order.

        Args:
          facts: text by name, such as shape and dtype by variable name.
          what: what kind of facts these are, for the error.

        Returns:
          The names in the order in which rank 0 has them.

        Raises:
          CollectiveMismatchError: naming each fact that differs, with the values of the ranks.
          HostOptError: a rank failed, left or timed out.
        """
        texts = self.all_gather_bytes(json.dumps(facts).encode(), what)
        tables = [json.loads(text) for text in texts]
        if any(table != tables[0] for table in tables):
            raise _mismatch(self.transport, tables, what)
        return list(tables[0])

    def operation(self, what: str = "") -> Operation:
        """Number the next call on this channel.

        Args:
          what: what the call reduces, for warnings and errors.

        Returns:
          The operation, to be run once.
        """
        with self._lock:
            return Operation(self.channel, next(self._steps), what=what or self.what)

    def _call(self, kind: str, what: str, array: Array | None = None) -> Operation:
        """Number and sign the next call on this channel."""
        what = what or self.what
        if array is None:
            signature = signature_of(kind, what)
        else:
            signature = signature_of(kind, what, array.dtype, array.shape)
        with self._lock:
            return Operation(self.channel, next(self._steps), 0, what, signature)

    def begin(self, operation: Operation) -> None:
        """Note that this rank makes a call, for others that wait for it.

        Args:
          operation: which call, signed.
        """
        self.transport.begin(*operation[:3], operation.signature)

    def abort(self, error: BaseException) -> None:
        """End the ring for all ranks, with `error` as the root cause."""
        self.transport.abort(error)

    def close(self) -> None:
        """Leave the ring in good order."""
        self.transport.close()
        if self.transport.timeline is not None:
            self.transport.timeline.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, type_: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.abort(error)
        self.close()

    def __deepcopy__(self, memo: object) -> Communicator:
        return self  # a copy of a configuration still talks over the same sockets


def _copy(array: Any) -> Array:
    result: Array = np.array(array, order="C", copy=True)
    return result


def _signed(
    operation: Operation, op: ReduceOp, flat: Array, wire_format: WireFormat | None
) -> Operation:
    travels_as = "" if wire_format is None else wire_format.name
    kind = f"all_reduce({op.value})"
    signature = signature_of(kind, operation.what, flat.dtype, flat.shape, travels_as)
    return operation._replace(signature=signature)


@functools.cache  # the name of a dtype takes longer than a small reduction
def _check_dtype(dtype: np.dtype[Any], op: ReduceOp) -> None:
    if dtype.name not in DTYPES:
        raise ConfigError(
            f"arrays of dtype {dtype.name} cannot be reduced, wanted one of {', '.join(DTYPES)}"
        )
    if op is ReduceOp.AVERAGE and dtype.kind == "i":
        raise ConfigError(f"the AVERAGE of {dtype.name} is not exact: reduce with SUM and divide")


def _mismatch(
    transport: Transport, tables: Sequence[dict[str, str]], what: str
) -> CollectiveMismatchError:
    tasks = transport.cluster.ring
    differing = [rank for rank, table in enumerate(tables) if table != tables[0]]
    names = sorted(
        name
        for name in set().union(*tables)
        if any(table.get(name) != tables[0].get(name) for table in tables)
    )
    shown = [f"{name!r}: {_values(tables, name)}" for name in names[:_SHOWN_NAMES]]
    if len(names) > _SHOWN_NAMES:
        shown.append(f"and {len(names) - _SHOWN_NAMES} more")
    return CollectiveMismatchError(
        f"{what} differ between rank 0 ({tasks[0]}) and "
        f"{', '.join(f'rank {rank} ({tasks[rank]})' for rank in differing)}: {'; '.join(shown)}. "
        "Start all ranks with the same program and options",
        rank=differing[0],
        task=tasks[differing[0]].name,
        address=tasks[differing[0]].address,
    )


def _values(tables: Sequence[dict[str, str]], name: str) -> str:
    """Which rank has which value; those that have that of rank 0 are not listed besides it."""
    ranks: dict[str, list[int]] = {}
    for rank, table in enumerate(tables):
        ranks.setdefault(table.get(name, "none"), []).append(rank)
    first = tables[0].get(name, "none")
    ranks[first] = [0]
    return ", ".join(
        f"rank {found[0]} has {value}"
        if len(found) == 1
        else f"ranks {', '.join(map(str, found))} have {value}"
        for value, found in ranks.items()
    )
