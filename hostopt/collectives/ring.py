"""Ring collectives: the schedules of `ring_schedule` on flat buffers, and byte strings.

A chunk travels as *segments* of at most `segment_bytes`. A rank forwards each segment as soon as
it is reduced, so reduction and both directions of the network overlap.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import itertools
import struct
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from hostopt.collectives.call import Array, Channel, CollectiveCall
from hostopt.collectives.messages import CallMessages
from hostopt.collectives.pairs import MEDIUM_BYTES, SMALL_BYTES, Pairs
from hostopt.collectives.ring_schedule import (
    ONE_STREAM,
    Round,
    Stripe,
    all_gather_rounds,
    all_reduce_rounds,
    chunk_slices,
    reduce_scatter_rounds,
    segments,
)
from hostopt.collectives.wire_format import WireFormat, no_compression
from hostopt.transport import event_loop
from hostopt.transport.base import Transport
from hostopt.transport.message import Payload, signature_of
from hostopt.transport.wakeup import at_once

_Result = TypeVar("_Result")
_LENGTH = struct.Struct("<Q")  # length of a string, at the start of its first message
# With several streams, the least size of a stripe. A smaller one costs more than a thread saves.
_LEAST_BYTES = 256 << 10


class RingGroup:
    """Ranks that form a ring, each of which sends to the next one.

    Args:
      members: ranks in ring order, including this one; by default all ranks.
      wire_format: format of float32 values on the wire; None sends any dtype unchanged.
    """

    def __init__(
        self,
        transport: Transport,
        members: Sequence[int] = (),
        wire_format: WireFormat | None = None,
    ) -> None:
        self._transport = transport
        self._members = members or range(transport.size)
        self._size = len(self._members)
        self._index = self._members.index(transport.rank)
        self._next = self._members[(self._index + 1) % self._size]
        self._previous = self._members[self._index - 1]
        self._wire_format = wire_format

    def all_reduce(self, call: CollectiveCall, flat: Array, op: np.ufunc = np.add) -> None:
        """Reduces a flat buffer, in place."""
        _complete(self._run, call, flat, all_reduce_rounds(self._index, self._size), op)

    def start_all_reduce(
        self, call: CollectiveCall, flat: Array
    ) -> concurrent.futures.Future[None]:
        """Starts to sum a flat buffer, in place. Do not access it until the future is done."""
        rounds = all_reduce_rounds(self._index, self._size)
        return event_loop.start(at_once(self._run, call, flat, rounds))

    def reduce_scatter(self, call: CollectiveCall, flat: Array, op: np.ufunc = np.add) -> Array:
        """Reduces a flat buffer, which is overwritten; returns a copy of this rank's chunk."""
        return self.reduce_scatter_in_place(call, flat, op).copy()

    def reduce_scatter_in_place(
        self, call: CollectiveCall, flat: Array, op: np.ufunc = np.add
    ) -> Array:
        """Reduces a flat buffer; returns this rank's chunk in it, of `chunk_slices`.

        The chunk has the bits that `all_reduce` would give it. The others are overwritten.
        """
        chunk: Array = flat[chunk_slices(flat.size, self._size)[self._index]]
        if self._size == 2:  # all_reduce would send the values, rounded
            self._round(chunk)
        _complete(self._run, call, flat, reduce_scatter_rounds(self._index, self._size), op)
        if self._size > 2:  # and here the sums
            self._round(chunk)
        return chunk

    def _round(self, flat: Array) -> None:
        """Rounds values as the wire format does, with as little scratch memory."""
        if self._wire_format is not None:
            for _, part in segments(flat, self._transport.segment_bytes):
                _encode(self._wire_format, part, keep=True)

    def all_gather_in_place(self, call: CollectiveCall, flat: Array) -> None:
        """Fills a flat buffer, of which each member has its chunk of `chunk_slices`."""
        _complete(self._run, call, flat, all_gather_rounds(self._index, self._size))

    def all_gather(self, call: CollectiveCall, array: Array) -> Array:
        """Gathers a contiguous array from every rank, as [size, ...] in the order of members."""
        result = np.empty((self._size, *array.shape), array.dtype)
        result[self._index] = array
        self.all_gather_in_place(call, result.reshape(-1))
        return result

    def broadcast(self, call: CollectiveCall, flat: Array, root: int) -> None:
        """Sends `flat` of one rank along the ring in segments, in place.

        The last rank then sends an acknowledgement around it: no rank returns before all have the
        data.
        """
        _complete(self._broadcast, call, flat, self._members.index(root))

    def all_gather_bytes(self, call: CollectiveCall, data: memoryview) -> list[bytes | memoryview]:
        """Gathers byte strings of any length, in the order of members; `data` itself is one."""
        return _complete(self._all_gather_bytes, call, data)

    def exchange(
        self, call: CollectiveCall, parts: Sequence[Array], slots: Sequence[Array], most: int
    ) -> None:
        """Sends part r of each rank to rank r; each pair exchanges its parts directly.

        Parts and slots are contiguous bytes of shape [n] for each rank; `most` is the length of
        the longest part of any rank.
        """
        slots[self._index][:] = parts[self._index]
        _complete(self._exchange, call, parts, slots)

    async def _run(
        self, call: CollectiveCall, flat: Array, rounds: list[Round], op: np.ufunc = np.add
    ) -> None:
        """Executes a schedule on the chunks of a flat buffer, in place.

        With a wire format, the last values that a rank encodes are the ones that all ranks keep:
        it stores the rounded values itself, and the others forward the bits that they receive.
        """
        if not rounds:
            return
        transport, size, wire = self._transport, self._size, self._wire_format
        if size > 2 and wire is None:
            pairs = functools.partial(Pairs, transport, self._members, call)
            small_bytes = min(SMALL_BYTES, transport.segment_bytes)
            if rounds[0].reduce and flat.nbytes <= small_bytes:
                await pairs(ONE_STREAM).double(flat, op)
                return
            if size & (size - 1) == 0 and flat.nbytes <= MEDIUM_BYTES:
                await self._run_on_streams(
                    flat.size // size,
                    flat.itemsize,
                    lambda stripe: pairs(stripe).halve(flat, op, rounds),
                )
                return
        count = 1 if rounds[0].send == rounds[0].recv else size
        chunks = [flat[each] for each in chunk_slices(flat.size, count)]
        await self._run_on_streams(
            chunks[0].size,
            (wire or no_compression(flat.dtype)).dtype.itemsize,
            lambda stripe: self._run_stripe(call, chunks, rounds, op, stripe),
        )

    async def _run_on_streams(
        self, length: int, itemsize: int, work: Callable[[Stripe], Coroutine[Any, Any, None]]
    ) -> None:
        """Runs a schedule once for each stream that is worth it, on its loop; called on loop 0.

        The longest chunk has `length` elements of `itemsize` bytes on the wire.
        """
        most = max(self._transport.segment_bytes // itemsize, 1)
        least = min(max(_LEAST_BYTES // itemsize, 1), most)
        streams = max(1, min(self._transport.streams, length // least))
        if streams == 1:
            await work(Stripe(0, 1, most))
            return
        stripes = [Stripe(each, streams, most) for each in range(streams)]
        await event_loop.run_on_loops({each.stream: at_once(work, each) for each in stripes})

    async def _run_stripe(
        self,
        call: CollectiveCall,
        chunks: Sequence[Array],
        rounds: list[Round],
        op: np.ufunc,
        stripe: Stripe,
    ) -> None:
        """Executes a schedule for one stripe of each chunk, on the loop of its stream."""
        messages = CallMessages(self._transport, call)
        wire = (self._wire_format or no_compression(chunks[0].dtype)).of(stripe.stream)
        call, stripes = call.over(stripe.streams), [stripe.of(chunk) for chunk in chunks]
        phases = [round_.phase for round_ in rounds]
        first_chunk, last = rounds[0].send, len(rounds) - 1
        # In an exchange and in an all-gather nobody encodes the first chunk again.
        keep_first = not rounds[0].reduce or first_chunk == rounds[0].recv
        first_segments = stripe.segments(stripes[first_chunk])
        scratch = np.empty(min(stripe.most, stripes[0].size), wire.dtype)
        # What is encoded or exchanged is overwritten soon, and a chunk that goes around the ring
        # once the next rank has it.
        lazily = wire.dtype == chunks[0].dtype and first_chunk != rounds[0].recv

        async def send_first(count: int) -> None:
            for segment, part in itertools.islice(first_segments, count):
                encoded = _encode(wire, part, keep_first)
                tag = call.tag(0, first_chunk, segment)
                await messages.send_array(self._next, tag, encoded, phases[0], lazily)

        async with messages.sending(self._next, phases[last]):
            await send_first(stripe.segments_ahead(wire.dtype.itemsize))
            for index, round_ in enumerate(rounds):
                # An empty chunk is sent as one empty segment for size - 1 rounds. So every rank
                # hears from every other one, and mismatched calls are detected, before any rank
                # returns.
                receives_empty = index + 1 < self._size
                forwards_empty = index + 2 < self._size
                for segment, part in stripe.segments(stripes[round_.recv], receives_empty):
                    tag = call.tag(index, round_.recv, segment)
                    into = None if round_.reduce or wire.dtype != part.dtype else part
                    encoded = await messages.receive_array(
                        self._previous, tag, part.size, wire.dtype, phases[index], into, scratch
                    )
                    if round_.reduce:
                        wire.reduce(part, encoded, op)
                    elif into is None:
                        wire.decode(encoded, part)
                    if index < last and (part.size or forwards_empty):
                        # Forward in the next round: sums are encoded again, copies are not.
                        if round_.reduce:
                            encoded = _encode(wire, part, keep=not rounds[index + 1].reduce)
                        tag = call.tag(index + 1, round_.recv, segment)
                        await messages.send_array(
                            self._next, tag, encoded, phases[index + 1], lazily
                        )
                    if index == 0:
                        await send_first(1)  # one out for each one in

    async def _broadcast(self, call: CollectiveCall, flat: Array, root: int) -> None:
        messages = CallMessages(self._transport, call)
        next_, last = (self._index + 1) % self._size, (root - 1) % self._size
        for segment, part in segments(flat, self._transport.segment_bytes):
            tag = call.tag(0, 0, segment)
            if self._index != root:
                await messages.receive_array(
                    self._previous, tag, part.size, flat.dtype, "broadcast", into=part
                )
            if next_ != root:
                await messages.send_array(self._next, tag, part, "broadcast")
        if self._size == 1:
            return
        tag = call.tag(round_=1)
        if self._index != last:
            await messages.receive(self._previous, tag, "acknowledgement")
        if next_ != last:
            await messages.send(self._next, tag, b"", "acknowledgement")

    async def _exchange(
        self, call: CollectiveCall, parts: Sequence[Array], slots: Sequence[Array]
    ) -> None:
        messages = CallMessages(self._transport, call)
        # rank r begins with rank r + 1, so that no rank receives from all others at once
        for offset in range(1, self._size):
            to, from_ = ((self._index + each) % self._size for each in (offset, -offset))
            await asyncio.gather(
                messages.send_segments(self._members[to], parts[to]),
                messages.receive_segments(self._members[from_], slots[from_]),
            )

    async def _all_gather_bytes(
        self, call: CollectiveCall, data: memoryview
    ) -> list[bytes | memoryview]:
        messages = CallMessages(self._transport, call)
        gathered: list[bytes | memoryview] = [data] * self._size
        if self._size > 1:
            most_bytes = self._transport.segment_bytes
            for segment, part in enumerate(_byte_segments(data, most_bytes)):
                tag = call.tag(0, self._index, segment)
                await messages.send(self._next, tag, part, "all-gather")
        for round_ in range(self._size - 1):
            origin = (self._index - 1 - round_) % self._size
            parts: list[memoryview] = []
            missing, segment = 1, 0  # the first message contains the real length
            while missing > 0:
                tag = call.tag(round_, origin, segment)
                part = await messages.receive(self._previous, tag, "all-gather")
                if round_ + 2 < self._size:
                    tag = tag._replace(round=round_ + 1)
                    await messages.send(self._next, tag, part, "all-gather")
                if segment == 0:
                    (missing,) = _LENGTH.unpack_from(part)
                    part = part[_LENGTH.size :]
                parts.append(part)
                missing -= len(part)
                segment += 1
            gathered[origin] = _joined(parts)
        return gathered


def _complete(function: Callable[..., Coroutine[Any, Any, _Result]], *arguments: Any) -> _Result:
    return event_loop.run(at_once(function, *arguments))


def _encode(wire: WireFormat, part: Array, keep: bool) -> Array:
    """Encodes values for the wire; with `keep`, also replaces them with the decoded values."""
    encoded = wire.encode(part)
    if keep and encoded is not part:
        wire.decode(encoded, part)
    return encoded


def _byte_segments(data: memoryview, segment_bytes: int) -> Iterator[Payload]:
    yield _LENGTH.pack(len(data)) + data[:segment_bytes]
    for start in range(segment_bytes, len(data), segment_bytes):
        yield data[start : start + segment_bytes]


def _joined(parts: list[memoryview]) -> bytes | memoryview:
    """Concatenates the parts; an array of numpy causes fewer page faults than `bytes`."""
    if len(parts) == 1:
        return bytes(parts[0])
    return np.concatenate([np.frombuffer(part, np.uint8) for part in parts]).data.toreadonly()


def all_gather_texts(channel: Channel, text: str, name: str) -> list[str]:
    """Gathers the text of each rank over the ring, in rank order; errors name the call `name`."""
    call = channel.next_call(name)._replace(signature=signature_of(name))
    channel.begin(call)
    gathered = RingGroup(channel.transport).all_gather_bytes(call, memoryview(text.encode()))
    return [bytes(each).decode() for each in gathered]
