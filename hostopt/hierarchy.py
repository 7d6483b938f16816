"""All-reduce in two levels: in memory among the ranks of a host, over gRPC between hosts.

With hosts A (ranks 0, 1) and B (ranks 2, 3):

    1. each host reduces in its lane              0+1       2+3
    2. the leaders, ranks 0 and 2, run the ring      0+1+2+3
    3. each leader gives the result to its host   1 from 0, 3 from 2

On one host the first step is all.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from typing import TYPE_CHECKING

import numpy as np

from hostopt import descriptors, ring, shared_file
from hostopt.compression import WireFormat
from hostopt.errors import ConfigError
from hostopt.hosts import Hosts, group_by_host
from hostopt.lane import Lane, Source, lane_bytes
from hostopt.ring import Array, Operation
from hostopt.shared_file import SharedFile
from hostopt.transport.base import Transport

if TYPE_CHECKING:
    from hostopt.communicator import Communicator

__all__: list[str] = []

_log = logging.getLogger(__name__)


class Hierarchy:
    """One rank's part in reductions of two levels.

    Args:
      hosts: which ranks share memory.
      lane: this rank's lane; None where it is alone on its host.
      transport: this rank's transport.
    """

    def __init__(self, hosts: Hosts, lane: Lane | None, transport: Transport) -> None:
        self._leaders = hosts.leaders
        self._leader = hosts.members(transport.rank)[0]
        self.lane = lane
        self._transport = transport

    def all_reduce(
        self,
        flat: Array,
        combine: np.ufunc,
        operation: Operation,
        wire_format: WireFormat | None = None,
        source: Source | None = None,
    ) -> None:
        """Reduce over all ranks.

        Args:
          flat: contiguous array of shape [n], the same shape and dtype on all ranks; receives
            the result.
          combine: binary ufunc.
          operation: which call this is.
          wire_format: how float32 values travel between hosts; None sends them as they are.
          source: this rank's values; by default those of `flat`.

        Raises:
          HostOptError: a rank failed, left or timed out.
        """
        if self.lane is not None:
            self.lane.all_reduce(flat, combine, operation, source)  # 1.
        elif source is not None:
            source.copy_to(flat)
        if len(self._leaders) == 1:
            return
        if self._transport.rank == self._leader:
            ring.all_reduce(  # 2.
                self._transport, operation, flat, combine, self._leaders, wire_format
            )
        if self.lane is not None:
            self.lane.broadcast(flat, self._leader, operation)  # 3.


def find_hosts(communicator: Communicator, host_id: str) -> Hosts | None:
    """Find out which ranks share memory; all ranks call this together.

    Args:
      communicator: reaches all ranks; its option `communication` says what is wanted.
      host_id: name of this rank's host, from `own_host_id`.

    Returns:
      The hosts; None where gRPC alone is wanted, or no two ranks share one.

    Raises:
      ConfigError: "shm" is wanted, and there are several hosts.
      HostOptError: a rank failed, left or timed out.
    """
    wanted = communicator.transport.options.communication
    if wanted == "grpc" or communicator.size == 1:
        return None
    found = communicator.all_gather_bytes(host_id.encode(), "the hosts of the ranks")
    hosts = group_by_host([name.decode() for name in found])
    if wanted == "shm" and len(hosts.groups) > 1:
        raise ConfigError(
            f"communication is 'shm', but the ranks that share memory are {list(hosts.groups)}: "
            "they run on several hosts, in containers with a /dev/shm of their own, or not on "
            "x86-64 Linux. Use 'auto', which reduces in memory where it can"
        )
    return hosts if len(hosts.groups) < communicator.size else None


def open_hierarchy(
    communicator: Communicator, hosts: Hosts, block_bytes: int, what: str = ""
) -> Hierarchy | None:
    """Share memory among the ranks of each host; all ranks of all hosts call this together.

    Args:
      communicator: reaches all ranks over gRPC.
      hosts: which ranks share memory.
      block_bytes: size of the lanes' blocks.
      what: for what the memory is used first, the same on all ranks.

    Returns:
      This rank's part; None where a host cannot share memory and `communication` is "auto".

    Raises:
      ConfigError: a host cannot, and `communication` is "shm".
      HostOptError: a rank failed, left or timed out.
    """
    members = hosts.members(communicator.rank)
    memory, troubles = share_memory(
        communicator, hosts, lane_bytes(len(members), block_bytes), what
    )
    if troubles:
        _report(communicator, troubles)
        return None
    lane = None  # where this rank is alone on its host
    if memory is not None:
        lane = Lane(memory, members, block_bytes, communicator.transport)
    return Hierarchy(hosts, lane, communicator.transport)


def share_memory(
    communicator: Communicator, hosts: Hosts, nbytes: int, what: str = ""
) -> tuple[memoryview | None, str]:
    """Share new memory among the ranks of each host; all ranks of all hosts call this together.

    Args:
      communicator: reaches all ranks over gRPC.
      hosts: which ranks share memory.
      nbytes: its size.
      what: for what it is, the same on all ranks.

    Returns:
      Zeros, None where this rank is alone on its host or a host has no such memory; and why it has
      none, with the ranks that found it, or "".

    Raises:
      HostOptError: a rank failed, left or timed out.
    """
    members, leader = hosts.members(communicator.rank), hosts.members(communicator.rank)[0]
    shared = f"shared memory for {what}" if what else "shared memory"
    memory: mmap.mmap | None = None
    trouble = ""
    with contextlib.ExitStack() as stack:
        path = ""
        if communicator.rank == leader and len(members) > 1:
            try:
                file = SharedFile(nbytes)
                stack.callback(file.unlink)  # when all have opened it
                path, memory = file.path, file.memory
            except OSError as error:
                descriptors.check(error)
                trouble = f"{shared_file.DIRECTORY} gives no {nbytes} bytes: {error}"
        paths = communicator.all_gather_bytes(path.encode(), f"the names of {shared}")
        path = paths[leader].decode()
        if communicator.rank != leader and path:
            try:
                memory = shared_file.attach(path, nbytes)
            except (OSError, ValueError) as error:
                descriptors.check(error)
                trouble = f"{path} cannot be mapped: {error}"
        troubles = communicator.all_gather_bytes(trouble.encode(), f"the state of {shared}")
    ring_ = communicator.transport.cluster.ring
    text = "; ".join(
        f"rank {rank} ({ring_[rank]}): {trouble.decode()}"
        for rank, trouble in enumerate(troubles)
        if trouble
    )
    return (None if text or memory is None else memoryview(memory)), text


def _report(communicator: Communicator, text: str) -> None:
    """Say why memory is not shared: as an error where it is demanded."""
    advice = "Enlarge /dev/shm (in Docker: --shm-size) or use communication='grpc'"
    if communicator.transport.options.communication == "shm":
        raise ConfigError(f"communication is 'shm', but memory cannot be shared: {text}. {advice}")
    if communicator.rank == 0:
        _log.warning("memory cannot be shared, reducing over gRPC instead: %s. %s", text, advice)
