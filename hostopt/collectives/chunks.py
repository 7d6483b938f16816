"""Collectives in place on a flat array that has a chunk of the same size for each rank."""

from __future__ import annotations

import numpy as np

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.wire_format import WireFormat


def has_chunks(communicator: Communicator) -> bool:
    """Returns True if the network carries a chunk for each rank, or for each host."""
    hosts = communicator.hosts
    return communicator.world is None and (hosts is None or hosts.are_even)


def reduce_scatter(
    communicator: Communicator,
    flat: Array,
    call: CollectiveCall,
    wire_format: WireFormat | None = None,
) -> None:
    """Sums an array, of which rank r gets chunk r; all others are overwritten.

    Collective: all ranks must call it. It needs `has_chunks`. The chunk has the bits that
    `Communicator.all_reduce_in_place` would give it.
    """
    communicator.begin(call)
    communicator.hierarchical(flat, call).reduce_scatter(flat, call, wire_format)


def all_gather(communicator: Communicator, flat: Array, name: str = "") -> None:
    """Fills an array, of which rank r has chunk r. Collective: all ranks must call it."""
    if not has_chunks(communicator):
        parts = np.split(flat.view(np.uint8), communicator.size)
        gathered = communicator.all_gather_bytes(parts[communicator.rank].data, name)
        for part, data in zip(parts, gathered):
            part[:] = np.frombuffer(data, np.uint8)
        return
    call = communicator.begin_call("all_gather_in_place", name, flat)
    communicator.hierarchical(flat, call).all_gather(flat, call)
