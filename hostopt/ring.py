"""The ring: a pure schedule of who sends which chunk when, and the loop that runs it.

Nomenclature: the flat buffer of n elements is cut into `size` *chunks*, chunk c being the part
that rank c reduces; a chunk travels as *segments* of at most `segment_bytes`. In each *round*
every rank sends one chunk to the next rank and receives one from the previous rank.

All-reduce with 3 ranks; r0, r1, r2 are the ranks, a number is the chunk that is sent:

    round        r0    r1    r2
      0   +       2     0     1      reduce-scatter: the receiver adds
      1   +       1     2     0      ... now rank r holds the sum of chunk r
      2   =       0     1     2      all-gather: the receiver copies
      3   =       2     0     1      ... now every rank holds every sum

The chunk received in a round is the chunk sent in the next one, so each segment is passed on the
moment it is reduced: reduction and both directions of the wire work at once.

After P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations" (2009). Every rank sends 2 (size - 1) / size of the buffer. The order of additions
depends on the chunk only and the sums are copied, so all ranks end with the same bits.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hostopt.compression import Whole, WireFormat
from hostopt.errors import ProtocolError
from hostopt.timeline import Track
from hostopt.transport import event_loop
from hostopt.transport.base import Payload, Tag, Transport
from hostopt.transport.signature import UNSIGNED, Signature

__all__: list[str] = []

Array = np.ndarray[Any, Any]

# Segments of the first chunk that a rank sends before it receives. They keep the wire busy; all
# at once would pile up at the receiver, in fresh memory that must be faulted in page by page.
_SEGMENTS_AHEAD = 4
_LENGTH = struct.Struct("<Q")  # of byte strings, before the first of their bytes


class Round(NamedTuple):
    """What one rank does in one round.

    Args:
      send: chunk that goes to the next rank.
      recv: chunk that comes from the previous rank.
      reduce: True where the received chunk is combined with this rank's, False where it
        replaces it.
    """

    send: int
    recv: int
    reduce: bool


class Operation(NamedTuple):
    """One collective call, the same on all ranks.

    Args:
      channel: channel of the communicator.
      step: sequence number on that channel, from 0.
      bucket: gradient bucket.
      what: what is reduced, for warnings and errors.
      signature: what all ranks compare.
    """

    channel: int
    step: int
    bucket: int = 0
    what: str = ""
    signature: Signature = UNSIGNED

    def in_phase(self, phase: str) -> str:
        """What is under way, for warnings and errors."""
        return f"{self.what or 'data'} ({phase})"

    def tag(self, round_: int = 0, chunk: int = 0, segment: int = 0) -> Tag:
        """Tag of one message of this call."""
        layout = self.signature.checksum
        return Tag(self.channel, self.step, self.bucket, round_, chunk, segment, layout)


def reduce_scatter_schedule(rank: int, size: int) -> list[Round]:
    """Rounds after which rank r holds the reduced chunk r.

    Args:
      rank: this rank, 0..size-1.
      size: number of ranks.

    Returns:
      size - 1 rounds.
    """
    return [
        Round((rank - 1 - i) % size, (rank - 2 - i) % size, reduce=True) for i in range(size - 1)
    ]


def all_gather_schedule(rank: int, size: int) -> list[Round]:
    """Rounds that carry chunk r from rank r to all ranks.

    Args:
      rank: this rank, 0..size-1.
      size: number of ranks.

    Returns:
      size - 1 rounds.
    """
    return [Round((rank - i) % size, (rank - 1 - i) % size, reduce=False) for i in range(size - 1)]


def all_reduce_schedule(rank: int, size: int) -> list[Round]:
    """Rounds of a reduce-scatter and an all-gather; see the grid in the module's docstring."""
    return reduce_scatter_schedule(rank, size) + all_gather_schedule(rank, size)


def chunk_slices(length: int, size: int) -> list[slice]:
    """Cut `length` elements into `size` chunks whose lengths differ by one at most.

    Args:
      length: number of elements, 0 or more.
      size: number of chunks.

    Returns:
      One slice a chunk; the first ``length % size`` chunks have one element more.
    """
    base, extra = divmod(length, size)
    starts = [c * base + min(c, extra) for c in range(size + 1)]
    return [slice(start, stop) for start, stop in zip(starts, starts[1:])]


def all_reduce(
    transport: Transport,
    operation: Operation,
    flat: Array,
    combine: np.ufunc = np.add,
    members: Sequence[int] = (),
    wire_format: WireFormat | None = None,
) -> None:
    """Reduce a flat buffer over the ranks, in place.

    Two ranks exchange their buffers and both combine them. That is as many bytes as the ring of
    two sends, in one round instead of two.

    Args:
      transport: this rank's transport.
      operation: which call this is.
      flat: contiguous array of shape [n], any numeric dtype.
      combine: binary ufunc that commutes.
      members: the ranks that reduce, this one among them; all by default.
      wire_format: how float32 values travel; None sends arrays of any dtype as they are.

    Raises:
      HostOptError: a peer failed, left or timed out, or sent another number of bytes.
    """
    members = members or range(transport.size)
    rounds, chunks = _all_reduce_rounds(members.index(transport.rank), len(members))
    run(transport, operation, flat, rounds, combine, members, chunks, wire_format)


def start_all_reduce(
    transport: Transport, operation: Operation, flat: Array
) -> concurrent.futures.Future[None]:
    """Start to sum a flat buffer over all ranks, in place, and return at once.

    Args:
      transport: this rank's transport.
      operation: which call this is.
      flat: contiguous array of shape [n], any numeric dtype; not to be touched before the end.

    Returns:
      Future that is done when `flat` is; its error is that of `all_reduce`.
    """
    members = range(transport.size)
    rounds, chunks = _all_reduce_rounds(transport.rank, transport.size)
    return event_loop.start(
        _run(transport, operation, flat, rounds, np.add, members, chunks, None)
    )


def _all_reduce_rounds(place: int, size: int) -> tuple[list[Round], int]:
    """Schedule of a member of a ring, and the number of its chunks."""
    if size == 2:
        return [Round(0, 0, reduce=True)], 1
    return all_reduce_schedule(place, size), size


def run(
    transport: Transport,
    operation: Operation,
    flat: Array,
    rounds: list[Round],
    combine: np.ufunc = np.add,
    members: Sequence[int] = (),
    chunks: int = 0,
    wire_format: WireFormat | None = None,
) -> None:
    """Run a schedule on a flat buffer, in place.

    With a wire format, what is sent is rounded, and what is combined is not. The first rank to
    send a chunk that nobody rounds after it rounds its own values as well, and the others pass on
    the bits that they receive: so all ranks end with the same.

    Args:
      transport: this rank's transport.
      operation: which call this is.
      flat: contiguous array of shape [n], any numeric dtype.
      rounds: this rank's schedule; what is received in a round is sent in the next.
      combine: binary ufunc for the rounds that reduce.
      members: the ranks that form the ring, this one among them; all by default.
      chunks: number of chunks that the schedule speaks of; by default as many as members.
      wire_format: how float32 values travel; None sends arrays of any dtype as they are.

    Raises:
      HostOptError: a peer failed, left or timed out, or sent another number of bytes.
    """
    members = members or range(transport.size)
    chunks = chunks or len(members)
    event_loop.run(_run(transport, operation, flat, rounds, combine, members, chunks, wire_format))


async def _run(
    transport: Transport,
    operation: Operation,
    flat: Array,
    rounds: list[Round],
    combine: np.ufunc,
    members: Sequence[int],
    chunks: int,
    wire_format: WireFormat | None,
) -> None:
    if not rounds:
        return
    place = members.index(transport.rank)
    succ, pred = members[(place + 1) % len(members)], members[place - 1]
    slices = chunk_slices(flat.size, chunks)
    wire = wire_format or Whole(flat.dtype)
    # in memory; on the wire they are as large as the option says
    segment_bytes = transport.options.segment_bytes * flat.itemsize // wire.dtype.itemsize

    first = _segments(flat[slices[rounds[0].send]], segment_bytes)
    exchanged = rounds[0].send == rounds[0].recv
    phases = {True: "exchange" if exchanged else "reduce-scatter", False: "all-gather"}

    async def send_first(count: int) -> None:
        for segment, part in itertools.islice(first, count):
            tag = operation.tag(0, rounds[0].send, segment)
            outgoing = _encode(wire, part, keep=exchanged or not rounds[0].reduce)
            await _send(transport, succ, tag, outgoing, operation, phases[rounds[0].reduce])

    await send_first(_SEGMENTS_AHEAD)
    for index, round_ in enumerate(rounds):
        # the first rounds carry empty chunks, too: so no rank ends before all have been compared
        carries_empty = index + 1 < len(members)
        passes_empty = index + 2 < len(members)
        for segment, part in _segments(flat[slices[round_.recv]], segment_bytes, carries_empty):
            tag = operation.tag(index, round_.recv, segment)
            phase = phases[round_.reduce]
            incoming = await _receive(transport, pred, tag, part, operation, phase, wire.dtype)
            if round_.reduce:
                wire.combine(part, incoming, combine)
            else:
                wire.decode(incoming, part)
            if index + 1 < len(rounds) and (part.size or passes_empty):
                tag = operation.tag(index + 1, round_.recv, segment)
                if round_.reduce:
                    incoming = _encode(wire, part, keep=not rounds[index + 1].reduce)
                phase = phases[rounds[index + 1].reduce]
                await _send(transport, succ, tag, incoming, operation, phase)
            if index == 0:
                await send_first(1)


def broadcast(transport: Transport, operation: Operation, flat: Array, root: int) -> None:
    """Carry `flat` of rank `root` down the chain root, root + 1, ... in segments, in place.

    The last rank of the chain then sends an acknowledgement around: to the root, which is its
    successor, and on to all others.

    Args:
      transport: this rank's transport.
      operation: which call this is.
      flat: contiguous array of shape [n]; overwritten on all ranks but `root`.
      root: rank whose values hold.

    Raises:
      HostOptError: a peer failed, left or timed out, or sent another number of bytes.
    """
    event_loop.run(_broadcast(transport, operation, flat, root))


async def _broadcast(transport: Transport, operation: Operation, flat: Array, root: int) -> None:
    succ, pred = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    for segment, part in _segments(flat, transport.options.segment_bytes):
        tag = operation.tag(0, 0, segment)
        if transport.rank != root:
            part[:] = await _receive(
                transport, pred, tag, part, operation, "broadcast", flat.dtype
            )
        if succ != root:
            await _send(transport, succ, tag, part, operation, "broadcast")
    if transport.size == 1:
        return
    last, tag, phase = (root - 1) % transport.size, operation.tag(round_=1), "acknowledgement"
    if transport.rank != last:
        await _take(transport, pred, tag, operation, phase)
    if succ != last:
        await _put(transport, succ, tag, b"", operation, phase)


def all_gather_bytes(
    transport: Transport, operation: Operation, data: memoryview
) -> list[bytes | memoryview]:
    """Carry the bytes of every rank around the ring, however many each has.

    The first message of a rank's bytes begins with their number, so that one schedule does.

    Args:
      transport: this rank's transport.
      operation: which call this is.
      data: contiguous bytes of this rank.

    Returns:
      The bytes of each rank, in rank order; `data` itself for this one.

    Raises:
      HostOptError: a peer failed, left or timed out.
    """
    return event_loop.run(_all_gather_bytes(transport, operation, data))


async def _all_gather_bytes(
    transport: Transport, operation: Operation, data: memoryview
) -> list[bytes | memoryview]:
    rank, size = transport.rank, transport.size
    succ, pred = (rank + 1) % size, (rank - 1) % size
    found: list[bytes | memoryview] = [data] * size
    if size > 1:
        for segment, part in enumerate(_byte_segments(data, transport.options.segment_bytes)):
            tag = operation.tag(0, rank, segment)
            await _put(transport, succ, tag, part, operation, "all-gather")
    for round_ in range(size - 1):
        origin = (pred - round_) % size
        parts: list[memoryview] = []
        missing, segment = 1, 0  # until the first message says how much there is
        while missing > 0:
            tag = operation.tag(round_, origin, segment)
            part = await _take(transport, pred, tag, operation, "all-gather")
            if round_ + 2 < size:
                tag = tag._replace(round=round_ + 1)
                await _put(transport, succ, tag, part, operation, "all-gather")
            if segment == 0:
                (missing,) = _LENGTH.unpack_from(part)
                part = part[_LENGTH.size :]
            parts.append(part)
            missing -= len(part)
            segment += 1
        found[origin] = _joined(parts)
    return found


def _joined(parts: list[memoryview]) -> bytes | memoryview:
    """The parts in one piece; memory of numpy costs fewer page faults than that of bytes."""
    if len(parts) == 1:
        return bytes(parts[0])
    return np.concatenate([np.frombuffer(part, np.uint8) for part in parts]).data.toreadonly()


def _byte_segments(data: memoryview, segment_bytes: int) -> Iterator[Payload]:
    yield _LENGTH.pack(len(data)) + data[:segment_bytes]
    for start in range(segment_bytes, len(data), segment_bytes):
        yield data[start : start + segment_bytes]


def send(transport: Transport, operation: Operation, flat: Array, peer: int) -> None:
    """Send an array to one rank, which calls `receive`, in segments.

    Args:
      transport: this rank's transport.
      operation: which call this is.
      flat: contiguous array of shape [n].
      peer: rank that receives it.

    Raises:
      HostOptError: the peer failed, left or timed out.
    """
    event_loop.run(_transfer(transport, operation, flat, peer, sends=True))


def receive(transport: Transport, operation: Operation, flat: Array, peer: int) -> None:
    """Receive an array from one rank, which calls `send`, in place.

    Args:
      transport: this rank's transport.
      operation: which call this is.
      flat: contiguous array of shape [n]; overwritten.
      peer: rank that sends it.

    Raises:
      HostOptError: the peer failed, left or timed out, or sent another number of bytes.
    """
    event_loop.run(_transfer(transport, operation, flat, peer, sends=False))


async def _transfer(
    transport: Transport, operation: Operation, flat: Array, peer: int, sends: bool
) -> None:
    for segment, part in _segments(flat, transport.options.segment_bytes):
        tag = operation.tag(0, 0, segment)
        if sends:
            await _send(transport, peer, tag, part, operation, "send")
        else:
            part[:] = await _receive(transport, peer, tag, part, operation, "send", flat.dtype)


async def _receive(
    transport: Transport,
    peer: int,
    tag: Tag,
    part: Array,
    operation: Operation,
    phase: str,
    dtype: np.dtype[Any],
) -> Array:
    """Receive as many elements as `part` has, of the dtype on the wire; read-only."""
    payload = await _take(transport, peer, tag, operation, phase)
    nbytes = part.size * dtype.itemsize
    if len(payload) != nbytes:
        error = ProtocolError(
            f"rank {transport.rank} expected {nbytes} bytes of {operation.what} from "
            f"rank {peer} ({transport.cluster.ring[peer]}) at {tag}, got {len(payload)}. Run the "
            "same version of hostopt on all ranks",
            rank=peer,
            step=tag.step,
            bucket=tag.bucket,
        )
        transport.abort(error)
        raise error
    return np.frombuffer(payload, dtype=dtype)


async def _take(
    transport: Transport, peer: int, tag: Tag, operation: Operation, phase: str
) -> memoryview:
    """Receive a message of any length; read-only."""
    begin_s = time.monotonic()
    what = operation.in_phase(phase)
    payload = await transport.recv(peer, tag, what)
    transport.recorder.note("received", peer, what, tag, len(payload))
    _show(transport, Track.RING_RECEIVE, tag, operation.what, begin_s, len(payload))
    return payload


def _encode(wire: WireFormat, part: Array, keep: bool) -> Array:
    """Round for the wire; `keep` what the others will get."""
    encoded = wire.encode(part)
    if keep and encoded is not part:
        wire.decode(encoded, part)
    return encoded


async def _send(
    transport: Transport, peer: int, tag: Tag, part: Array, operation: Operation, phase: str
) -> None:
    await _put(transport, peer, tag, part.view(np.uint8).data, operation, phase)


async def _put(
    transport: Transport, peer: int, tag: Tag, payload: Payload, operation: Operation, phase: str
) -> None:
    begin_s = time.monotonic()
    what = operation.in_phase(phase)
    await transport.send(peer, tag, payload, what)
    transport.recorder.note("sent", peer, what, tag, len(payload))
    _show(transport, Track.RING_SEND, tag, operation.what, begin_s, len(payload))


def _show(
    transport: Transport, track: Track, tag: Tag, what: str, begin_s: float, payload_bytes: int
) -> None:
    if transport.timeline is not None:
        transport.timeline.message(track, tag, what, begin_s, time.monotonic(), payload_bytes)


def _segments(
    chunk: Array, segment_bytes: int, at_least_one: bool = True
) -> Iterator[tuple[int, Array]]:
    length = max(segment_bytes // chunk.itemsize, 1)
    for segment, start in enumerate(range(0, max(chunk.size, at_least_one), length)):
        yield segment, chunk[start : start + length]
