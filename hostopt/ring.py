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

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hostopt.errors import ProtocolError
from hostopt.transport.base import Tag, Transport

__all__: list[str] = []

Array = np.ndarray[Any, Any]


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


@dataclass(frozen=True)
class Operation:
    """One collective call, the same on all ranks.

    Args:
      channel: channel of the communicator.
      step: sequence number on that channel, from 0.
      bucket: gradient bucket.
      what: what is reduced, for warnings and errors.
    """

    channel: int
    step: int
    bucket: int = 0
    what: str = field(default="", compare=False)

    def tag(self, round_: int, chunk: int, segment: int, layout: int) -> Tag:
        """Tag of one message of this call."""
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


def run(
    transport: Transport,
    operation: Operation,
    flat: Array,
    rounds: list[Round],
    combine: np.ufunc = np.add,
) -> None:
    """Run a schedule on a flat buffer, in place.

    Args:
      transport: this rank's transport.
      operation: which call this is.
      flat: contiguous array of shape [n], any numeric dtype.
      rounds: this rank's schedule; what is received in a round is sent in the next.
      combine: binary ufunc for the rounds that reduce.

    Raises:
      HostOptError: a peer failed, left or timed out, or sent another number of bytes.
    """
    if not rounds:
        return
    succ, pred = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    slices = chunk_slices(flat.size, transport.size)
    segment_bytes, layout = transport.options.segment_bytes, _layout(flat)

    for segment, part in _segments(flat[slices[rounds[0].send]], segment_bytes):
        tag = operation.tag(0, rounds[0].send, segment, layout)
        _send(transport, succ, tag, part, operation.what)
    for index, round_ in enumerate(rounds):
        for segment, part in _segments(flat[slices[round_.recv]], segment_bytes):
            tag = operation.tag(index, round_.recv, segment, layout)
            incoming = receive_into(transport, pred, tag, part, operation.what)
            if round_.reduce:
                combine(part, incoming, out=part)
            else:
                part[:] = incoming
            if index + 1 < len(rounds):
                tag = operation.tag(index + 1, round_.recv, segment, layout)
                _send(transport, succ, tag, part, operation.what)


def broadcast(transport: Transport, operation: Operation, flat: Array, root: int) -> None:
    """Carry `flat` of rank `root` down the chain root, root + 1, ... in segments, in place.

    Args:
      transport: this rank's transport.
      operation: which call this is.
      flat: contiguous array of shape [n]; overwritten on all ranks but `root`.
      root: rank whose values hold.

    Raises:
      HostOptError: a peer failed, left or timed out, or sent another number of bytes.
    """
    succ, pred = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    layout = _layout(flat)
    for segment, part in _segments(flat, transport.options.segment_bytes):
        tag = operation.tag(0, 0, segment, layout)
        if transport.rank != root:
            part[:] = receive_into(transport, pred, tag, part, operation.what)
        if succ != root:
            _send(transport, succ, tag, part, operation.what)


def receive_into(transport: Transport, peer: int, tag: Tag, part: Array, what: str) -> Array:
    """Receive as many elements as `part` has, without touching `part`.

    Args:
      transport: this rank's transport.
      peer: rank to receive from.
      tag: which message.
      part: array of shape [n] that says how many elements of which dtype are wanted.
      what: what is received, for errors.

    Returns:
      Read-only array like `part`.

    Raises:
      ProtocolError: the peer sent another number of bytes.
    """
    payload = transport.recv(peer, tag, what)
    if len(payload) != part.nbytes:
        error = ProtocolError(
            f"rank {transport.rank} expected {part.nbytes} bytes of {what or 'data'} from rank "
            f"{peer} ({transport.cluster.ring[peer]}) at {tag}, got {len(payload)}. All ranks "
            "must pass arrays of the same shape and dtype",
            rank=peer,
            step=tag.step,
            bucket=tag.bucket,
        )
        transport.abort(error)
        raise error
    return np.frombuffer(payload, dtype=part.dtype)


def _layout(flat: Array) -> int:
    return zlib.crc32(f"{flat.dtype.name}[{flat.size}]".encode())


def _send(transport: Transport, peer: int, tag: Tag, part: Array, what: str) -> None:
    transport.send(peer, tag, part.view(np.uint8).data, what)


def _segments(chunk: Array, segment_bytes: int) -> Iterator[tuple[int, Array]]:
    length = max(segment_bytes // chunk.itemsize, 1)
    for segment, start in enumerate(range(0, chunk.size, length)):
        yield segment, chunk[start : start + length]
