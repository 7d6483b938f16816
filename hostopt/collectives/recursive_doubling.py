"""All-reduce of small arrays by recursive doubling: log2(size) rounds instead of 2 (size - 1).

In round i, rank r exchanges its sum with rank r XOR 2**i, so every rank has the sum of 2, 4, 8 and
so on ranks. All-reduce with 4 ranks; each entry is the ranks whose values the sum contains:

    round    r0      r1      r2      r3
      0      01      01      23      23
      1      0123    0123    0123    0123

If the number of ranks is not a power of two, the first `extra` odd ranks hand their values to
their even neighbours before, and get the result from them afterwards.

After R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations
in MPICH" (2005). Each rank sends log2(size) times the array, so large arrays are better reduced on
the ring. The operands of each sum are in rank order on both sides, so all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.messages import CallMessages
from hostopt.transport.base import Transport

# Up to this size, recursive doubling of 4 and 8 ranks is faster than the ring.
MOST_BYTES = 64 << 10
_PHASE = "exchange"


def partners(index: int, size: int) -> list[int]:
    """Returns the positions that a position exchanges messages with, in order of rounds."""
    rounds = size.bit_length() - 1
    extra = size - (1 << rounds)  # ranks that do not fit into a power of two
    if index < 2 * extra and index % 2:
        return [index - 1]
    place = index // 2 if index < 2 * extra else index - extra
    others = [place ^ (1 << i) for i in range(rounds)]
    exchanged = [2 * other if other < extra else other + extra for other in others]
    return [index + 1, *exchanged] if index < 2 * extra else exchanged


async def all_reduce(
    transport: Transport, members: Sequence[int], call: CollectiveCall, flat: Array, op: np.ufunc
) -> None:
    """Reduces a small flat buffer of any numeric dtype, in place; `op` is commutative."""
    messages = CallMessages(transport, call)
    index, size = members.index(transport.rank), len(members)
    last_round = size.bit_length()
    is_folded = index < 2 * (size - (1 << last_round - 1))
    others = partners(index, size)

    async def receive(peer: int, round_: int) -> Array:
        tag = call.tag(round_)
        return await messages.receive_array(members[peer], tag, flat.size, flat.dtype, _PHASE)

    async def send(peer: int, round_: int) -> None:
        await messages.send_array(members[peer], call.tag(round_), flat, _PHASE)

    if is_folded and index % 2:
        await send(others[0], 0)
        flat[:] = await receive(others[0], last_round)
        return
    if is_folded:
        op(flat, await receive(others[0], 0), out=flat)
    for round_, peer in enumerate(others[is_folded:], start=1):
        await send(peer, round_)
        received = await receive(peer, round_)
        first, second = (flat, received) if index < peer else (received, flat)
        op(first, second, out=flat)
    if is_folded:
        await send(others[0], last_round)
