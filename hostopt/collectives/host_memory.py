"""Finds the ranks that share a host, opens memory among them, and reduces in it or beyond."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import mmap
import weakref

import numpy as np

from hostopt.collectives import shared_file
from hostopt.collectives.call import Array, Channel, CollectiveCall
from hostopt.collectives.hosts import Hosts, group_by_host
from hostopt.collectives.ring import RingGroup, all_gather_texts
from hostopt.collectives.sequence_counters import SequenceCounters
from hostopt.collectives.shared_memory import SharedMemoryChannel, TensorListView, channel_bytes
from hostopt.collectives.wire_format import WireFormat
from hostopt.errors import ConfigError
from hostopt.process import descriptors
from hostopt.transport.base import Transport
from hostopt.transport.message import signature_of

_log = logging.getLogger(__name__)

# Block sizes of shared memory. Arrays up to the smaller size use a channel that takes less memory.
SMALL_BLOCK_BYTES, BLOCK_BYTES = 64 << 10, 1 << 20

_SCALARS = signature_of("posted sum", "", np.dtype(np.float32), (2,))
_DECLINED = "this rank shares no more memory"
_reported: weakref.WeakSet[Transport] = weakref.WeakSet()  # that memory is missing


class HierarchicalAllReduce:
    """Two-level all-reduce: in shared memory within each host, over the network between hosts.

        [H1] each host reduces in shared memory
        [H2] the leaders, which are the first ranks of the hosts, all-reduce on a ring
        [H3] each leader broadcasts the result on its host

    With one host, only [H1] runs. A rank that is alone on its host has no shared memory.

    A flat buffer has a chunk for each rank. If all hosts have the same number of ranks in a row,
    their chunks make the chunk of the host. A reduce-scatter and an all-gather need only that one:

        [H4] as [H1], then the leaders reduce-scatter, and each broadcasts the chunk of its host
        [H5] the ranks of a host gather its chunk, the leaders all-gather, and broadcast the rest
    """

    def __init__(
        self, hosts: Hosts, shared_memory: SharedMemoryChannel | None, transport: Transport
    ) -> None:
        self.shared_memory = shared_memory
        self._leaders = hosts.leaders
        self._members = hosts.members(transport.rank)
        self._leader = self._members[0]
        self._transport = transport

    def all_reduce(
        self,
        flat: Array,
        op: np.ufunc,
        call: CollectiveCall,
        wire_format: WireFormat | None = None,
        source: TensorListView | None = None,
    ) -> None:
        """Reduces an array over all ranks, in place. Collective: all ranks must call it."""
        self._reduce_on_host(flat, op, call, source)
        if len(self._leaders) == 1:
            return
        if self._transport.rank == self._leader:
            leaders = RingGroup(self._transport, self._leaders, wire_format)
            leaders.all_reduce(call, flat, op)  # [H2]
        if self.shared_memory is not None:
            self.shared_memory.broadcast(flat, self._leader, call)  # [H3]

    def _reduce_on_host(
        self, flat: Array, op: np.ufunc, call: CollectiveCall, source: TensorListView | None
    ) -> None:
        if self.shared_memory is not None:
            self.shared_memory.all_reduce(flat, op, call, source)  # [H1]
        elif source is not None:
            source.copy_to(flat)

    def reduce_scatter(
        self, flat: Array, call: CollectiveCall, wire_format: WireFormat | None
    ) -> None:
        """Sums an array, of which this rank gets the chunk of its host: [H4]."""
        self._reduce_on_host(flat, np.add, call, None)
        if self._transport.rank == self._leader:
            leaders = RingGroup(self._transport, self._leaders, wire_format)
            leaders.reduce_scatter_in_place(call, flat)
        if self.shared_memory is not None:
            self.shared_memory.broadcast(self._chunk_of_host(flat), self._leader, call)

    def all_gather(self, flat: Array, call: CollectiveCall) -> None:
        """Fills an array, of which each rank has its chunk: [H5]."""
        if self.shared_memory is not None:
            chunk = self._chunk_of_host(flat)
            parts = np.split(chunk.view(np.uint8), len(self._members))
            own = parts[self._members.index(self._transport.rank)]
            for part, data in zip(parts, self.shared_memory.all_gather_bytes(own.data, call)):
                part[:] = np.frombuffer(data, np.uint8)
        if self._transport.rank == self._leader:
            RingGroup(self._transport, self._leaders).all_gather_in_place(call, flat)
        if self.shared_memory is not None:
            self.shared_memory.broadcast(flat, self._leader, call)

    def _chunk_of_host(self, flat: Array) -> Array:
        index = self._leaders.index(self._leader)
        chunk: Array = np.split(flat, len(self._leaders))[index]
        return chunk


class HostMemory:
    """Shared memory of one communicator, opened at first use."""

    def __init__(self, channel: Channel, hosts: Hosts) -> None:
        self.is_declined = False  # True on any rank makes all ranks use messages instead
        self._channel = channel
        self._hosts = hosts
        self._hierarchical: dict[int, HierarchicalAllReduce | None] = {}  # by block size

    def hierarchical(self, nbytes: int, name: str = "") -> HierarchicalAllReduce | None:
        """Returns the two-level all-reduce for `nbytes`; None if memory cannot be shared.

        Collective: all ranks must call it, with the same `name` of the call that needs it.
        """
        block_bytes = SMALL_BLOCK_BYTES if nbytes <= SMALL_BLOCK_BYTES else BLOCK_BYTES
        if block_bytes not in self._hierarchical:
            self._hierarchical[block_bytes] = self._open(block_bytes, name)
        return self._hierarchical[block_bytes]

    def channel_of_all(self, nbytes: int = 0, name: str = "") -> SharedMemoryChannel | None:
        """Returns the channel of all ranks; None if they share no host. See `hierarchical`."""
        if not self._hosts.is_single:
            return None
        hierarchical = self.hierarchical(nbytes, name)
        return None if hierarchical is None else hierarchical.shared_memory

    def allocate(self, nbytes: int) -> memoryview | None:
        """Allocates zeros that each host's ranks share. Collective: all ranks must call it."""
        memory, problem = self._share(nbytes)
        if problem and self._channel.rank == 0:
            _log.warning("%s: no memory to share: %s", self._channel.name, problem)
        return memory

    def close(self) -> None:
        """Frees the memory of collectives, which no later call may need."""
        self._hierarchical.clear()

    def _open(self, block_bytes: int, name: str) -> HierarchicalAllReduce | None:
        channel, members = self._channel, self._hosts.members(self._channel.rank)
        memory, problem = self._share(channel_bytes(len(members), block_bytes), name)
        if problem:
            _report(channel, problem)
            return None
        shared_memory = None
        if memory is not None:
            shared_memory = SharedMemoryChannel(memory, members, block_bytes, channel.transport)
        return HierarchicalAllReduce(self._hosts, shared_memory, channel.transport)

    def _share(self, nbytes: int, name: str = "") -> tuple[memoryview | None, str]:
        """Shares new memory among the ranks of each host. Collective: all ranks must call it.

        Returns the memory, filled with zeros, or None if this rank is alone on its host or any
        rank failed; and the failures with their ranks, or "".
        """
        channel, is_declined = self._channel, self.is_declined
        members = self._hosts.members(channel.rank)
        is_leader = channel.rank == members[0]
        call = name or f"share_memory of {channel.name or 'a channel'}"
        memory: mmap.mmap | None = None
        path, problem = "", _DECLINED if is_declined else ""
        with contextlib.ExitStack() as stack:
            if is_leader and len(members) > 1 and not is_declined:
                try:
                    # it has a name until all ranks have mapped it
                    path, memory = stack.enter_context(shared_file.create(nbytes))
                except OSError as error:
                    descriptors.check(error)
                    problem = f"{shared_file.DIRECTORY} has no {nbytes} bytes free: {error}"
            # The first gather tells the others the path. After the second one all have mapped the
            # file, so that the leader may unlink it.
            path = all_gather_texts(channel, path, call)[members[0]]
            if not is_leader and path and not is_declined:
                try:
                    memory = shared_file.attach(path, nbytes)
                except (OSError, ValueError) as error:
                    descriptors.check(error)
                    problem = f"{path} cannot be mapped: {error}"
            problems = all_gather_texts(channel, problem, call)
        describe = channel.transport.cluster.describe
        text = "; ".join(f"{describe(rank)}: {each}" for rank, each in enumerate(problems) if each)
        return (None if text or memory is None else memoryview(memory)), text


class ScalarSum:
    """Sums two float32 scalars over the ranks: `start` does not block, `wait` does.

    If all ranks share memory, each writes its scalars to `counters`, and every rank adds them up.
    Otherwise the event loop runs an all-reduce. Nothing else may use the channel or the counters.
    """

    def __init__(self, channel: Channel, counters: SequenceCounters | None) -> None:
        self._channel = channel
        self._counters = counters
        self._ring = RingGroup(channel.transport)
        self._scalars: Array
        self._call: CollectiveCall
        self._result: concurrent.futures.Future[None]

    def start(self, first: float, second: float = 0.0) -> None:
        """Starts the sums. Each call must be followed by `wait` before the next one."""
        self._scalars = np.array([first, second], np.float32)
        self._call = self._channel.next_call()._replace(signature=_SCALARS)
        self._channel.begin(self._call)
        if self._counters is None:
            self._result = self._ring.start_all_reduce(self._call, self._scalars)
        else:
            self._counters.write_word(self._call.step, int(self._scalars.view(np.uint64)[0]))

    def wait(self) -> tuple[np.float32, np.float32]:
        """Waits until every rank has started; returns the sums, the same bits on all ranks."""
        if self._counters is None:
            self._result.result()
            first, second = self._scalars
        else:
            words = np.array(self._counters.read_words(self._call), np.uint64)
            first, second = functools.reduce(np.add, words.view(np.float32).reshape(-1, 2))
        return first, second


def find_hosts(channel: Channel, host_id: str) -> Hosts | None:
    """Groups the ranks by host. Collective: all ranks must call it.

    Returns None unless `communication` is "auto" or "shm", or if no two ranks share a host.
    """
    communication = channel.transport.options.communication
    if communication not in ("auto", "shm") or channel.size == 1:
        return None
    hosts = group_by_host(all_gather_texts(channel, host_id, "find_hosts of the ranks"))
    if communication == "shm" and not hosts.is_single:
        raise ConfigError(
            f"communication is 'shm', but the ranks that share memory are {list(hosts.groups)}: "
            "they run on several hosts, in containers with separate /dev/shm, or not on "
            "x86-64 Linux. Use 'auto', which uses shared memory within each host"
        )
    return hosts if len(hosts.groups) < channel.size else None


def _report(channel: Channel, problem: str) -> None:
    """Raises if the option `communication` requires shared memory, else logs a warning once."""
    advice = "Enlarge /dev/shm (in Docker: --shm-size) or use communication='grpc+tcp'"
    if channel.transport.options.communication == "shm":
        raise ConfigError(
            f"communication is 'shm', but memory cannot be shared: {problem}. {advice}"
        )
    if channel.rank == 0 and _DECLINED not in problem and channel.transport not in _reported:
        _reported.add(channel.transport)
        _log.warning(
            "memory cannot be shared, reducing over the network instead: %s. %s", problem, advice
        )
