"""Exchange of a different array between each pair of ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.messages import CallMessages
from hostopt.transport.base import Transport


async def exchange(
    transport: Transport, call: CollectiveCall, parts: Sequence[Array], slots: Sequence[Array]
) -> None:
    """Sends a part to each rank, and receives one from each; a coroutine for the event loop.

    Args:
      transport: transport of this rank.
      parts: contiguous array for each rank; that of this rank is not sent.
      slots: contiguous array for the part of each rank, overwritten but for that of this rank.
    """
    messages = CallMessages(transport, call)
    rank, size = transport.rank, transport.size
    # rank r begins with rank r + 1, so that no rank receives from all others at once
    for offset in range(1, size):
        to, from_ = (rank + offset) % size, (rank - offset) % size
        await asyncio.gather(
            messages.send_segments(to, parts[to].reshape(-1)),
            messages.receive_segments(from_, slots[from_].reshape(-1)),
        )
