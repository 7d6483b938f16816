"""Exchanges of pairs of ranks: doubling for small arrays, halving and doubling for medium ones.

**Recursive doubling** all-reduces. In round i, rank r exchanges its sum with rank r XOR 2**i. With
4 ranks, each entry is the ranks whose values the sum contains:

    round    r0      r1      r2      r3
      0      01      01      23      23
      1      0123    0123    0123    0123

If the number of ranks is not a power of two, the first `extra` odd ranks hand their values to
their even neighbours before, and get the result from them afterwards.

**Recursive halving**, of 2**k ranks, is a reduce-scatter. In each round, a rank exchanges half of
the chunks that it still reduces with a partner, and adds what it receives to the other half. With
4 ranks, each entry is the chunks that a rank still reduces; the all-gather takes the steps back:

    distance    r0      r1      r2      r3
                0123    0123    0123    0123
       2        01      01      23      23
       1        0       1       2       3

The operands of each sum are in rank order, and the sums are copied, so all ranks get the same
bits. docs/algorithms.md has the numbers of messages and bytes, and the source.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.messages import CallMessages
from hostopt.collectives.ring_schedule import Round, Stripe, chunk_slices
from hostopt.transport.base import Transport

# Up to these sizes, doubling, and halving of 4 and 8 ranks, are faster than the ring.
SMALL_BYTES, MEDIUM_BYTES = 64 << 10, 4 << 20

Parts = list[Array]  # of a stream's stripes, each contiguous


def partners(index: int, size: int) -> list[int]:
    """Returns the positions that a position exchanges small arrays with, in order of rounds."""
    rounds = size.bit_length() - 1
    extra = size - (1 << rounds)  # ranks that do not fit into a power of two
    if index < 2 * extra and index % 2:
        return [index - 1]
    place = index // 2 if index < 2 * extra else index - extra
    others = [place ^ (1 << i) for i in range(rounds)]
    exchanged = [2 * other if other < extra else other + extra for other in others]
    return [index + 1, *exchanged] if index < 2 * extra else exchanged


class Pairs:
    """The schedules of one rank among `members`, for one stream."""

    def __init__(
        self, transport: Transport, members: Sequence[int], call: CollectiveCall, stripe: Stripe
    ) -> None:
        self._messages = CallMessages(transport, call)
        self._members = members
        self._index = members.index(transport.rank)
        self._call = call.over(stripe.streams)
        self._stripe = stripe

    async def double(self, flat: Array, op: np.ufunc) -> None:
        """All-reduces a buffer of one segment, in place; `op` is commutative."""
        size, messages, call = len(self._members), self._messages, self._call
        last_round = size.bit_length()
        is_folded = self._index < 2 * (size - (1 << last_round - 1))
        others = partners(self._index, size)

        async def send(partner: int, round_: int) -> None:
            await messages.send_array(self._members[partner], call.tag(round_), flat, "exchange")

        async def receive(partner: int, round_: int, into: Array | None = None) -> Array:
            peer, tag = self._members[partner], call.tag(round_)
            return await messages.receive_array(peer, tag, flat.size, flat.dtype, "exchange", into)

        if is_folded and self._index % 2:
            await send(others[0], 0)
            await receive(others[0], last_round, flat)
            return
        if is_folded:
            op(flat, await receive(others[0], 0), out=flat)
        for round_, partner in enumerate(others[is_folded:], start=1):
            await send(partner, round_)
            received = await receive(partner, round_)
            pair = (flat, received) if self._index < partner else (received, flat)
            op(*pair, out=flat)
        if is_folded:
            await send(others[0], last_round)

    async def halve(self, flat: Array, op: np.ufunc, rounds: list[Round]) -> None:
        """Does to a flat buffer, in place, what the rounds of a ring would do."""
        steps = self._steps(flat)
        if rounds[0].reduce:
            for round_, (partner, own, other) in enumerate(steps):
                await self._exchange(partner, round_, "reduce-scatter", other, own, op)
        if not rounds[-1].reduce:
            for round_, (partner, own, other) in enumerate(reversed(steps), start=len(steps)):
                await self._exchange(partner, round_, "all-gather", own, other)

    def _steps(self, flat: Array) -> list[tuple[int, Parts, Parts]]:
        """Returns each partner, what this rank still reduces afterwards, and what the partner."""
        steps, first, distance = [], 0, len(self._members) // 2
        while distance:
            lower, upper = (
                self._parts(flat, begin, begin + distance) for begin in (first, first + distance)
            )
            is_upper = self._index & distance != 0
            own, other = (upper, lower) if is_upper else (lower, upper)
            steps.append((self._index ^ distance, own, other))
            first += distance * is_upper
            distance //= 2
        return steps

    def _parts(self, flat: Array, begin: int, end: int) -> Parts:
        """Returns this stream's stripes of a range of chunks."""
        slices = chunk_slices(flat.size, len(self._members))[begin:end]
        if self._stripe.streams == 1:
            return [flat[slices[0].start : slices[-1].stop]]
        return [self._stripe.of(flat[each]) for each in slices]

    def _segments(self, parts: Parts) -> Iterator[tuple[int, int, Array]]:
        for place, part in enumerate(parts):
            for segment, values in self._stripe.segments(part):
                yield place, segment, values

    async def _exchange(
        self,
        partner: int,
        round_: int,
        phase: str,
        sent: Parts,
        wanted: Parts,
        op: np.ufunc | None = None,
    ) -> None:
        """Sends some parts of the buffer, and receives others or, with `op`, reduces into them."""
        peer = self._members[partner]
        sending = self._segments(sent)

        async def send(count: int | None) -> None:
            for place, segment, values in itertools.islice(sending, count):
                tag = self._call.tag(round_, place, segment)
                await self._messages.send_array(peer, tag, values, phase, lazily=True)

        async with self._messages.sending(peer, phase):
            await send(self._stripe.segments_ahead(sent[0].itemsize))
            for place, segment, values in self._segments(wanted):
                tag, into = self._call.tag(round_, place, segment), values if op is None else None
                received = await self._messages.receive_array(
                    peer, tag, values.size, values.dtype, phase, into
                )
                if op is not None:
                    pair = (values, received) if self._index < partner else (received, values)
                    op(*pair, out=values)
                await send(1)  # one out for each one in
            await send(None)
