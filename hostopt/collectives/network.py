"""The network of a channel: a ring of messages, or MPI."""

from __future__ import annotations

from typing import Any, Union

from hostopt.collectives.call import CollectiveCall
from hostopt.collectives.mpi.group import MpiGroup
from hostopt.collectives.mpi.world import World
from hostopt.collectives.ring import RingGroup
from hostopt.collectives.wire_format import WireFormat
from hostopt.transport.base import Transport

Group = Union[RingGroup, MpiGroup]


class Network:
    """Carries the collectives of one channel.

    Args:
      world: opens a communicator of MPI at the first call; None uses the ring.
    """

    def __init__(self, transport: Transport, world: World | None = None) -> None:
        self.world = world
        self._transport = transport
        self._is_open = world is None
        self._communicators: tuple[Any, Any] | None = None
        self._group: Group = RingGroup(transport)  # without a wire format

    def group(self, call: CollectiveCall, wire_format: WireFormat | None = None) -> Group:
        """Returns all ranks as a group. Collective: all ranks must call it."""
        if self.world is not None and not self._is_open:
            self._communicators = self.world.open(call)
            self._is_open = True
            self._group = self._new_group(None)
        return self._group if wire_format is None else self._new_group(wire_format)

    def _new_group(self, wire_format: WireFormat | None) -> Group:
        if self._communicators is None:
            return RingGroup(self._transport, (), wire_format)
        return MpiGroup(self._transport, self._communicators, wire_format)
