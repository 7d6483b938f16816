"""Exchange of a different array between each pair of ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.messages import CallMessages
from hostopt.collectives.ring import RingGroup
from hostopt.transport import event_loop
from hostopt.transport.base import Transport

__all__: list[str] = []


def all_to_all(
    transport: Transport, call: CollectiveCall, parts: Sequence[Array]
) -> tuple[Array, Array]:
    """Sends part r of each rank to rank r.

    Collective: all ranks must call it. Each pair of ranks exchanges its parts directly.

    Args:
      transport: transport of this rank.
      call: the collective call.
      parts: contiguous array of shape [n, ...] for each rank. All parts of all ranks have the
        same dtype and the same shape but for n.

    Returns:
      The parts that this rank has received, joined in rank order, and the n of each, int64 [size].
    """
    rank, size = transport.rank, transport.size
    counts = np.array([len(part) for part in parts], np.int64)
    received = RingGroup(transport).all_gather(call, counts)[:, rank].copy()
    own = parts[rank]
    result = np.empty((int(received.sum()), *own.shape[1:]), own.dtype)
    ends = np.cumsum(received)
    slots = [result[end - count : end] for end, count in zip(ends, received)]
    slots[rank][:] = own
    if size > 1:
        event_loop.run(_exchange(transport, call._replace(bucket=1), parts, slots))
    return result, received


async def _exchange(
    transport: Transport, call: CollectiveCall, parts: Sequence[Array], slots: Sequence[Array]
) -> None:
    messages = CallMessages(transport, call)
    rank, size = transport.rank, transport.size
    # rank r begins with rank r + 1, so that no rank receives from all others at once
    for offset in range(1, size):
        to, from_ = (rank + offset) % size, (rank - offset) % size
        await asyncio.gather(
            messages.send_segments(to, parts[to].reshape(-1)),
            messages.receive_segments(from_, slots[from_].reshape(-1)),
        )
