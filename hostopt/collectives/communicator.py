"""Collectives over arrays and byte strings, in the same order on every rank."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np

from hostopt.cluster.cluster import Cluster
from hostopt.collectives.call import Array, Channel, CollectiveCall
from hostopt.collectives.host_memory import HierarchicalAllReduce, HostMemory, ScalarSum
from hostopt.collectives.hosts import Hosts
from hostopt.collectives.messages import CallMessages
from hostopt.collectives.mpi.group import MpiGroup, World
from hostopt.collectives.pairs import partners
from hostopt.collectives.reduce_op import ReduceOp, check_dtype
from hostopt.collectives.ring import RingGroup
from hostopt.collectives.shared_memory import TensorListView
from hostopt.collectives.wire_format import WireFormat
from hostopt.errors import CollectiveMismatchError, ConfigError
from hostopt.transport import event_loop
from hostopt.transport.base import Transport
from hostopt.transport.message import FINISH_CHANNEL, UNSIGNED, Tag, signature_of

_SHOWN_NAMES = 20  # maximum number of names in an error


class Communicator(Channel):
    """Collectives over all ranks of a transport, on one channel.

    All ranks must make the same calls in the same order. Threads that run at the same time, and
    calls whose order differs between ranks, must use separate communicators; see `duplicate`.

    Every collective raises HostOptError if a rank failed, left or timed out. The `name` of a call
    describes its data, or what is waited for, in warnings and errors.

    Args:
      transport: transport of this rank.
      channel: number of the channel; 0 for the first communicator of a transport.
      name: describes the data of the channel, for warnings and errors.
      hosts: ranks grouped by host, to all-reduce in shared memory; None uses the network only.
      world: the ranks as MPI knows them, which then carries the data between them; None uses the
        transport.
    """

    def __init__(
        self,
        transport: Transport,
        channel: int = 0,
        name: str = "",
        hosts: Hosts | None = None,
        world: World | None = None,
    ) -> None:
        super().__init__(transport, channel, name)
        self.world = world
        self._new_group: Callable[..., RingGroup | MpiGroup] | None = None
        self._group: RingGroup | MpiGroup  # without a wire format
        self.hosts = hosts
        self.memory: HostMemory | None = None
        each_alone = Hosts(tuple((rank,) for rank in range(transport.size)))
        self._on_network = HierarchicalAllReduce(each_alone, None, transport)
        self._opening: Channel | None = None  # of shared memory, or communicators of MPI
        if hosts is not None or world is not None:
            number = transport.open_channel(f"what channel {channel} opens")
            self._opening = Channel(transport, number, name)
        if hosts is not None and self._opening is not None:
            self.memory = HostMemory(self._opening, hosts)

    def refuse(self, reason: str) -> None:
        """See `Channel.refuse`."""
        super().refuse(reason)
        if self._opening is not None:  # the next call that opens something is refused
            self._opening.refuse(reason)

    @property
    def on_one_host(self) -> bool:
        """True if all ranks share memory, so that no collective uses the network."""
        return self.hosts is not None and self.hosts.is_single

    def duplicate(self, name: str = "") -> Communicator:
        """Opens another channel over the same ranks.

        Ranks may open channels of different names in different orders. Channels with the same
        name, or without a name, must be opened in the same order on all ranks. The duplicates of
        channels with different names do not count as channels with the same name.

        Args:
          name: describes the data of the channel; ranks match channels by name.

        Returns:
          A communicator whose messages never mix with those of this one.

        Raises:
          ConfigError: the name has the same channel number as another name.
        """
        path = f"{self.name}: {name}" if self.name else name
        number = self.transport.open_channel(path)
        return Communicator(self.transport, number, name, self.hosts, self.world)

    def open_scalar_sum(self, name: str) -> ScalarSum:
        """Opens a non-blocking sum of two float32 scalars. Collective: all ranks must call it."""
        channel = self.duplicate(name)
        shared_memory = None if channel.memory is None else channel.memory.channel_of_all()
        return ScalarSum(channel, None if shared_memory is None else shared_memory.counters)

    def all_reduce(self, array: Any, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Array:
        """Reduces an array over the ranks, to the same bits. Collective: all ranks must call it.

        Args:
          array: array of any shape, one of `DTYPES`, the same shape and dtype on all ranks.
          op: reduction operator; AVERAGE needs a floating dtype.

        Returns:
          A new array like `array`.

        Raises:
          ConfigError: the dtype is not supported.
        """
        result = _copy(array)
        call = self.signed_call(f"all_reduce({op.value})", name, result)
        self.all_reduce_in_place(result.reshape(-1), op, call)
        return result

    def all_reduce_in_place(
        self,
        flat: Array,
        op: ReduceOp,
        call: CollectiveCall,
        wire_format: WireFormat | None = None,
        source: TensorListView | None = None,
    ) -> None:
        """Reduces a flat array over the ranks, in place. Collective: all ranks must call it.

        Args:
          flat: contiguous array of shape [n], one of `DTYPES`.
          call: the collective call, from `next_call`. It is signed here unless it has a signature.
          wire_format: format on the wire of a SUM or an AVERAGE of float32; None changes nothing.
          source: values of this rank; by default those in `flat`.
        """
        check_dtype(flat.dtype, op)
        if wire_format is not None and (op.ufunc is not np.add or flat.dtype != np.float32):
            raise ConfigError(
                f"{op.name} of {flat.dtype.name} cannot be sent as {wire_format.name}. Only a SUM "
                "or an AVERAGE of float32 can be"
            )
        if call.signature is UNSIGNED:
            format_name = "" if wire_format is None else wire_format.name
            kind = f"all_reduce({op.value})"
            signature = signature_of(kind, call.name, flat.dtype, flat.shape, format_name)
            call = call._replace(signature=signature)
        self.begin(call)
        if self.world is None:
            self.hierarchical(flat, call).all_reduce(flat, op.ufunc, call, wire_format, source)
        else:
            if source is not None:
                source.copy_to(flat)
            self.group(call, wire_format).all_reduce(call, flat, op.ufunc)
        if op is ReduceOp.AVERAGE:
            np.divide(flat, flat.dtype.type(self.size), out=flat)

    def group(
        self, call: CollectiveCall, wire_format: WireFormat | None = None
    ) -> RingGroup | MpiGroup:
        """Returns all ranks as a group, over MPI or on the ring. All ranks must call it."""
        if self._new_group is None:
            self._new_group = RingGroup
            if self.world is not None and self._opening is not None:
                opened = self.world.open(self._opening, call)
                if opened is not None:
                    self._new_group = functools.partial(MpiGroup, communicators=opened)
            self._group = self._new_group(self.transport)
        if wire_format is None:
            return self._group
        return self._new_group(self.transport, wire_format=wire_format)

    def hierarchical(self, flat: Array, call: CollectiveCall) -> HierarchicalAllReduce:
        """Returns what reduces an array without MPI. Collective, as it opens shared memory."""
        hierarchical = None
        if self.memory is not None:
            hierarchical = self.memory.hierarchical(flat.nbytes, call.signature.text)
        return hierarchical or self._on_network

    def reduce_scatter(self, array: Any, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Array:
        """Reduces an array over the ranks. Rank r gets chunk r of the flattened result.

        Collective: all ranks must call it.

        Args:
          array: array of any shape, one of `DTYPES`, the same shape and dtype on all ranks.
          op: reduction operator; AVERAGE needs a floating dtype.

        Returns:
          A new array of shape [k]. The lengths of two ranks differ by at most one.

        Raises:
          ConfigError: the dtype is not supported.
        """
        array = _copy(array)
        check_dtype(array.dtype, op)
        call = self.begin_call(f"reduce_scatter({op.value})", name, array)
        chunk = self.group(call).reduce_scatter(call, array.reshape(-1), op.ufunc)
        if op is ReduceOp.AVERAGE:
            chunk /= chunk.dtype.type(self.size)
        return chunk

    @property
    def has_chunks(self) -> bool:
        """True if the network carries a chunk for each rank, or for each host."""
        return self.world is None and (self.hosts is None or self.hosts.are_even)

    def reduce_scatter_in_place(
        self, flat: Array, call: CollectiveCall, wire_format: WireFormat | None = None
    ) -> None:
        """Sums an array with a chunk of the same size for each rank, which gets that one.

        Collective: all ranks must call it. It needs `has_chunks`. The chunk has the bits that
        `all_reduce_in_place` would give it; all others are overwritten.
        """
        self.begin(call)
        self.hierarchical(flat, call).reduce_scatter(flat, call, wire_format)

    def all_gather(self, array: Any, name: str = "") -> Array:
        """Gathers the array of every rank on every rank. Collective: all ranks must call it.

        Args:
          array: array of any shape and fixed-size dtype, the same on all ranks.

        Returns:
          A new array of shape [size, ...]; row r is the array of rank r.
        """
        array = _copy(array)
        call = self.begin_call("all_gather", name, array)
        return self.group(call).all_gather(call, array)

    def all_gather_in_place(self, flat: Array, name: str = "") -> None:
        """Fills an array, of which rank r has chunk r. Collective: all ranks must call it."""
        if self.has_chunks:
            call = self.begin_call("all_gather_in_place", name, flat)
            self.hierarchical(flat, call).all_gather(flat, call)
            return
        parts = np.split(flat.view(np.uint8), self.size)
        for part, data in zip(parts, self.all_gather_bytes(parts[self.rank].data, name)):
            part[:] = np.frombuffer(data, np.uint8)

    def broadcast(self, array: Any, root: int = 0, name: str = "") -> Array:
        """Sends the array of one rank to all ranks. Collective: all ranks must call it.

        Args:
          array: array of any shape and fixed-size dtype, the same on all ranks.
          root: rank whose values are sent.

        Returns:
          A new array like `array`, with the bits of rank `root`.

        Raises:
          ConfigError: `root` is not a rank.
        """
        if not 0 <= root < self.size:
            raise ConfigError(f"broadcast root is {root}, wanted a rank from 0 to {self.size - 1}")
        result = _copy(array)
        call = self.begin_call(f"broadcast from rank {root}", name, result)
        self.group(call).broadcast(call, result.reshape(-1), root)
        return result

    @overload
    def all_gather_bytes(self, data: bytes, name: str = "") -> list[bytes]: ...

    @overload
    def all_gather_bytes(
        self, data: memoryview | Array, name: str = ""
    ) -> list[bytes | memoryview]: ...

    def all_gather_bytes(self, data: Any, name: str = "") -> Any:
        """Gathers byte strings of any length on every rank. Collective: all ranks must call it.

        Args:
          data: bytes of this rank, or a contiguous buffer.

        Returns:
          The bytes of each rank, in rank order. If `data` is a buffer, long strings and `data`
          itself are returned as read-only views.
        """
        view = memoryview(data)
        view = view.cast("B").toreadonly() if view.nbytes else memoryview(b"")
        call = self.begin_call("all_gather_bytes", name)
        shared_memory = None
        if self.memory is not None:
            # All ranks must choose the same block size, so it must not depend on the length of the
            # data, which may differ between ranks. The smallest blocks stay in cache.
            shared_memory = self.memory.channel_of_all(0, call.signature.text)
        if shared_memory is not None:
            gathered = shared_memory.all_gather_bytes(view, call)
        else:
            gathered = self.group(call).all_gather_bytes(call, view)
        if isinstance(data, bytes):
            gathered = [bytes(each) for each in gathered]
            gathered[self.rank] = data
        return gathered

    def gather_bytes(self, data: bytes, name: str = "") -> list[bytes]:
        """Gathers byte strings of any length on rank 0. Collective: all ranks must call it.

        Returns the bytes of each rank, in rank order, on rank 0; an empty list on other ranks.
        """
        call = self.begin_call("gather_bytes", name)
        lengths = RingGroup(self.transport).all_gather(call, np.array(len(data), np.int64))
        messages = CallMessages(self.transport, self.signed_call("gather_bytes", name))
        if self.rank != 0:
            event_loop.run(messages.send_segments(0, np.frombuffer(data, np.uint8)))
            return []
        gathered = [data]
        for peer in range(1, self.size):
            flat = np.empty(int(lengths[peer]), np.uint8)
            event_loop.run(messages.receive_segments(peer, flat))
            gathered.append(flat.tobytes())
        return gathered

    def scatter_bytes(self, data: Sequence[bytes], name: str = "") -> bytes:
        """Sends a byte string from rank 0 to each rank. Collective: all ranks must call it.

        `data` has the bytes for each rank, in rank order, on rank 0; it is ignored on others.
        """
        is_root = self.rank == 0
        lengths = np.array([len(each) for each in data] if is_root else [0] * self.size, np.int64)
        RingGroup(self.transport).broadcast(self.begin_call("scatter_bytes", name), lengths, 0)
        messages = CallMessages(self.transport, self.signed_call("scatter_bytes", name))
        if not is_root:
            flat = np.empty(int(lengths[self.rank]), np.uint8)
            event_loop.run(messages.receive_segments(0, flat))
            return flat.tobytes()
        for peer in range(1, self.size):
            event_loop.run(messages.send_segments(peer, np.frombuffer(data[peer], np.uint8)))
        return data[0]

    def check_same(self, table: dict[str, str], name: str) -> list[str]:
        """Checks that all ranks have the same entries. Collective: all ranks must call it.

        Args:
          table: text by name, in any order, such as shape and dtype by variable name.
          name: describes the table, for the error.

        Returns:
          The names in the order of rank 0.

        Raises:
          CollectiveMismatchError: an entry differs. The error lists the values of the ranks.
        """
        tables = all_gather_json(self, table, name)
        if any(other != tables[0] for other in tables):
            raise _mismatch(tables, self.transport.cluster, name)
        return list(tables[0])

    def barrier(self, name: str = "barrier") -> None:
        """Waits until every rank has called this. Collective: all ranks must call it."""
        call = self.signed_call("barrier", name)
        self.all_reduce_in_place(np.zeros(1, np.int32), ReduceOp.SUM, call)

    def finish(self, name: str = "the end of training") -> None:
        """Waits for all ranks, and fails if another rank still expects data from this one.

        Collective: all ranks must call it.
        """
        if self.size == 1:
            return
        # all communicators of a ring share the channel, so their calls are numbered together
        number = next(self.transport.finishes)
        call = self.signed_call("finish", name)._replace(channel=FINISH_CHANNEL, step=number)
        self.begin(call)
        # A rank that receives this marker while it waits for data of this rank fails immediately.
        marker = Tag(FINISH_CHANNEL, call.step, bucket=1)
        for peer in _receivers(self.rank, self.size, self.hosts):
            event_loop.run(self.transport.send_marker(peer, marker, name))
        RingGroup(self.transport).all_reduce(call, np.zeros(1, np.int32))
        self.transport.mailbox.resume(call.step)

    def close(self) -> None:
        """Leaves the ring normally."""
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
        return self  # copies of a configuration share its connections


def _copy(array: Any) -> Array:
    result: Array = np.array(array, order="C", copy=True)
    return result


def _mismatch(
    tables: Sequence[dict[str, str]], cluster: Cluster, description: str
) -> CollectiveMismatchError:
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
        f"{description} differ between {cluster.describe(0)} and "
        f"{', '.join(map(cluster.describe, differing))}: {'; '.join(shown)}. "
        "Start all ranks with the same program and options",
        **cluster.attributes(differing[0]),
    )


def _values(tables: Sequence[dict[str, str]], name: str) -> str:
    """Lists a name's values with their ranks; rank 0 alone stands for those that agree with it."""
    ranks: dict[str, list[int]] = {}
    for rank, table in enumerate(tables):
        ranks.setdefault(table.get(name, "none"), []).append(rank)
    ranks[tables[0].get(name, "none")] = [0]
    return ", ".join(
        f"rank {holders[0]} has {value}"
        if len(holders) == 1
        else f"ranks {', '.join(map(str, holders))} have {value}"
        for value, holders in ranks.items()
    )


def all_gather_json(communicator: Communicator, value: Any, name: str = "") -> list[Any]:
    """Gathers what JSON can hold from each rank. Collective: all ranks must call it."""
    texts = communicator.all_gather_bytes(json.dumps(value).encode(), name)
    return [json.loads(text) for text in texts]


def _receivers(rank: int, size: int, hosts: Hosts | None) -> set[int]:
    """Returns the ranks that may wait for data of a rank, in any all-reduce."""
    peers = _receivers_in(range(size), rank)
    if hosts is not None:
        peers.update(hosts.members(rank))
        if rank in hosts.leaders:
            peers |= _receivers_in(hosts.leaders, rank)
    return peers - {rank}


def _receivers_in(members: Sequence[int], rank: int) -> set[int]:
    """Returns the next rank on the ring, and the partners of recursive doubling."""
    index, size = members.index(rank), len(members)
    positions = [(index + 1) % size, *partners(index, size)]
    return {members[position] for position in positions}
