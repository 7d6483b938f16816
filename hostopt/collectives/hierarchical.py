"""Two-level all-reduce: in shared memory within each host, over the network between hosts.

With hosts A (ranks 0, 1) and B (ranks 2, 3):

    [H1] each host reduces in shared memory                  0+1       2+3
    [H2] the leaders, ranks 0 and 2, all-reduce on a ring      0+1+2+3
    [H3] each leader broadcasts the result on its host       1 from 0, 3 from 2

With one host, only [H1] runs.
"""

from __future__ import annotations

import numpy as np

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.hosts import Hosts
from hostopt.collectives.ring import RingGroup
from hostopt.collectives.shared_memory import SharedMemoryChannel
from hostopt.collectives.tensor_list_view import TensorListView
from hostopt.collectives.wire_format import WireFormat
from hostopt.transport.base import Transport


class HierarchicalAllReduce:
    """Two-level all-reduce of one rank.

    Args:
      shared_memory: channel of this rank's host; None if no other rank runs there.
    """

    def __init__(
        self, hosts: Hosts, shared_memory: SharedMemoryChannel | None, transport: Transport
    ) -> None:
        self.shared_memory = shared_memory
        self._leaders = hosts.leaders
        self._leader = hosts.members(transport.rank)[0]
        self._transport = transport

    def all_reduce(
        self,
        flat: Array,
        op: np.ufunc,
        call: CollectiveCall,
        wire_format: WireFormat | None = None,
        source: TensorListView | None = None,
    ) -> None:
        """Reduces an array over all ranks, in place.

        Collective: all ranks must call it.
        """
        if self.shared_memory is not None:
            self.shared_memory.all_reduce(flat, op, call, source)  # [H1]
        elif source is not None:
            source.copy_to(flat)
        if len(self._leaders) == 1:
            return
        if self._transport.rank == self._leader:
            leaders = RingGroup(self._transport, self._leaders, wire_format)
            leaders.all_reduce(call, flat, op)  # [H2]
        if self.shared_memory is not None:
            self.shared_memory.broadcast(flat, self._leader, call)  # [H3]
