"""Communicators of MPI for the channels of a ring, and collectives over all ranks on them.

Collectives of MPI have no tags: those on one communicator are matched by their order. So each
channel has its own communicators, opened at its first call:

    [M1] all ranks agree over the ring that they are in the same call
    [M2] rank 0 takes its lock and tells the others to go on
    [M3] all ranks duplicate the parent communicator twice, without blocking
    [M4] all ranks agree that they have done so, and rank 0 releases its lock

[M2] gives the duplicates one order, whatever the order in which threads of the ranks call.

Ranks start the exchange of the data only if all of them make the same call, so a wrong one cannot
do harm in the MPI library. For that they compare their calls first, unless they all expect one:

    [E1] all ranks have made the same calls so far, so all expect the same next one: the one that
         followed the last time
    [E2] a rank that makes the expected all-reduce starts it at once: it ends only if all ranks do
    [E3] a rank that makes another call first gathers the calls of all ranks, on a communicator of
         its own; those that wait in [E2] do not take part, and the ring finds the mismatch

What MPI has no types for, and the minimum and maximum of floating numbers, whose NaNs it may drop,
the ranks reduce with numpy:

    [R1] all-to-all: rank r gets chunk r of every rank
    [R2] rank r reduces its chunk, first its own values, then the others' in rank order
    [R3] all-gather of the reduced chunks
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hostopt.collectives.call import Array, Channel, CollectiveCall, bytes_of
from hostopt.collectives.messages import CallMessages
from hostopt.collectives.mpi import runtime
from hostopt.collectives.mpi.runtime import wait
from hostopt.collectives.ring import all_gather_texts
from hostopt.collectives.ring_schedule import chunk_slices
from hostopt.collectives.wire_format import WireFormat, no_compression
from hostopt.errors import ConfigError, RendezvousTimeoutError
from hostopt.transport import event_loop
from hostopt.transport.base import Transport
from hostopt.transport.message import Tag

# Channels with communicators: MPICH has 2048 in a process. Channels of further names use the ring.
_MAX_CHANNELS = 500
_GROUP_TAG = 0x686F
_POLL_S = 0.05
# Larger arrays are exchanged in pieces. The deadline counts from the end of a piece, and the
# counts of MPI 3 have 31 bits.
_PIECE_BYTES = 64 << 20
_NATIVE = "fdbBilq"  # numpy's characters of float32, float64, int8, uint8, int32 and int64
_Place = tuple[int, int, int]  # of a call: checksum, bucket, steps after the call before
_HEADER = 4  # checksum, step and bucket, which must be the same, and a number that may differ


class World:
    """Opens the communicators of the channels of one ring."""

    def __init__(self, transport: Transport, parent: Any) -> None:
        self._transport = transport
        self._parent = parent  # communicator of MPI over the ranks of the ring, in their order
        self._lock = threading.Lock()  # held on rank 0 during [M2] to [M4]
        self._count = 0

    def open(self, opening: Channel, call: CollectiveCall) -> tuple[Any, Any] | None:
        """Opens two communicators of MPI for a call. Collective: all ranks must call it.

        The `opening` channel has the messages for this. Returns None if a rank has too many.
        """
        name = call.signature.text
        problem = "" if self._count < _MAX_CHANNELS else "too many"
        if any(all_gather_texts(opening, problem, name)):  # [M1]
            return None
        with self._turn(opening, name):  # [M2]
            opened = self._duplicate(call), self._duplicate(call)  # [M3]
            all_gather_texts(opening, "", name)  # [M4]
        self._count += 1
        return opened

    def _duplicate(self, call: CollectiveCall) -> Any:
        communicator, request = self._parent.Idup()
        wait(self._transport, call, request, "opening a communicator")
        return communicator

    @contextlib.contextmanager
    def _turn(self, opening: Channel, name: str) -> Iterator[None]:
        call = opening.begin_call("turn", name)
        messages = CallMessages(self._transport, call)
        if self._transport.rank:
            event_loop.run(messages.receive(0, call.tag(), "turn"))
            yield
            return
        while not self._lock.acquire(timeout=_POLL_S):  # its holder has deadlines
            if self._transport.error is not None:
                raise self._transport.error
        try:
            for peer in range(1, self._transport.size):
                event_loop.run(messages.send(peer, call.tag(), b"", "turn"))
            yield
        finally:
            self._lock.release()


def open_world(channel: Channel) -> World:
    """Starts MPI, unless it runs, for a group of all ranks. Collective: all ranks must call it."""
    transport, thread = channel.transport, runtime.prepare(channel.transport.options)
    transport.mailbox.on_failure(lambda _: setattr(thread, "has_failed", True))
    _wait(transport, thread.call(thread.start), "MPI_Init_thread")
    ranks = _find_ranks(channel)
    world = runtime.load().COMM_WORLD
    group = world.Get_group().Incl(ranks)
    opening = thread.call(lambda: world.Create_group(group, _GROUP_TAG))
    parent = _wait(transport, opening, "MPI_Comm_create_group")
    parent.Set_errhandler(runtime.load().ERRORS_RETURN)  # duplicates inherit it
    return World(transport, parent)


def _find_ranks(channel: Channel) -> list[int]:
    """Returns the number of each rank in MPI_COMM_WORLD."""
    world = runtime.load().COMM_WORLD
    local = {"rank": world.rank, "size": world.size, "library": runtime.library_version()}
    places = list(
        map(json.loads, all_gather_texts(channel, json.dumps(local), "the ranks of MPI"))
    )
    ranks = [int(place["rank"]) for place in places]
    is_same = all({**place, "rank": 0} == {**places[0], "rank": 0} for place in places)
    if not is_same or len(set(ranks)) < len(ranks):
        describe = channel.transport.cluster.describe
        shown = "; ".join(
            f"{describe(rank)} is process {place['rank']} of {place['size']} of {place['library']}"
            for rank, place in enumerate(places)
        )
        raise ConfigError(
            f"MPI does not know the ranks as one group of {channel.size}: {shown}. Start all "
            "ranks with one mpirun, and mpi4py with the MPI library of that mpirun"
        )
    return ranks


def _wait(transport: Transport, future: concurrent.futures.Future[Any], name: str) -> Any:
    """Waits for a call on the thread of MPI, unless the ring is aborted."""
    timeout_s = transport.options.rendezvous_timeout_s
    deadline_s = time.monotonic() + timeout_s
    while not concurrent.futures.wait([future], _POLL_S).done:
        if transport.error is not None:
            raise transport.error
        if time.monotonic() > deadline_s:
            raise RendezvousTimeoutError(
                f"{name} has not returned within {timeout_s:g} s. Check that all processes of the "
                "launcher use communication='mpi', and the network between them",
                **transport.cluster.attributes(transport.rank),
            )
    return future.result()


class MpiGroup:
    """All ranks, on two communicators of MPI of their own: for data, and to compare calls."""

    def __init__(
        self,
        transport: Transport,
        communicators: tuple[Any, Any],
        wire_format: WireFormat | None = None,
    ) -> None:
        self._transport = transport
        self._wait = functools.partial(wait, transport)
        self._mpi = runtime.load()
        self._communicator, self._comparisons = communicators
        self._wire_format = wire_format
        self._rank, self._size = transport.rank, transport.size
        self._header = np.zeros(_HEADER, np.int64)
        self._headers = np.zeros((self._size, _HEADER), np.int64)
        self._step = 0  # of the last call
        self._last: _Place = (0, 0, 0)
        self._followers: dict[_Place, _Place] = {}  # the call after each call, the last time

    def all_reduce(self, call: CollectiveCall, flat: Array, op: np.ufunc = np.add) -> None:
        """Reduces a flat buffer, in place; see `RingGroup.all_reduce`."""
        # without data, nothing would wait for the others
        is_exchanged = flat.size > 0 and self._native_op(flat.dtype, op) is not None
        is_expected = is_exchanged and self._is_expected(call, flat.nbytes)
        if not is_expected:
            self._begin(call, flat.nbytes)
        self._all_reduce(call, flat, op, have_all_called=not is_expected)

    def reduce_scatter(self, call: CollectiveCall, flat: Array, op: np.ufunc = np.add) -> Array:
        """Reduces a flat buffer, which is overwritten; see `RingGroup.reduce_scatter`."""
        self._begin(call, flat.nbytes)
        slices = chunk_slices(flat.size, self._size)
        native = self._native_op(flat.dtype, op)
        if native is None or flat.nbytes > _PIECE_BYTES:
            self._all_reduce(call, flat, op)
            kept: Array = flat[slices[self._rank]].copy()
            return kept
        counts = [part.stop - part.start for part in slices]
        chunk = np.empty(counts[self._rank], flat.dtype)
        request = self._communicator.Ireduce_scatter(flat, chunk, counts, native)
        self._wait(call, request, "reduce-scatter", flat, chunk)
        return chunk

    def all_gather(self, call: CollectiveCall, array: Array) -> Array:
        """Gathers an array from every rank; see `RingGroup.all_gather`."""
        self._begin(call, array.nbytes)
        result = np.empty((self._size, *array.shape), array.dtype)
        result[self._rank] = array
        self._gather(call, bytes_of(result), [array.nbytes] * self._size)
        return result

    def broadcast(self, call: CollectiveCall, flat: Array, root: int) -> None:
        """Sends `flat` of one rank to all ranks, in place; see `RingGroup.broadcast`."""
        self._begin(call, flat.nbytes)
        self._broadcast(call, bytes_of(flat), root)

    def all_gather_bytes(self, call: CollectiveCall, data: memoryview) -> list[bytes | memoryview]:
        """Gathers byte strings, whose lengths may differ; see `RingGroup.all_gather_bytes`."""
        lengths = self._begin(call, len(data), len(data))
        ends = list(itertools.accumulate(lengths))
        result = np.empty(ends[-1], np.uint8)
        result[ends[self._rank] - len(data) : ends[self._rank]] = np.frombuffer(data, np.uint8)
        self._gather(call, result, lengths)
        view = result.data.toreadonly()
        gathered: list[bytes | memoryview] = [
            view[end - length : end] for end, length in zip(ends, lengths)
        ]
        gathered[self._rank] = data
        return gathered

    def exchange(
        self, call: CollectiveCall, parts: Sequence[Array], slots: Sequence[Array], most: int
    ) -> None:
        """Sends part r of each rank to rank r; see `RingGroup.exchange`."""
        self._begin(call, sum(map(len, parts)))
        self._exchange(call, parts, slots, most)

    # -- steps of the collectives -----------------------------------------------------------

    def _is_expected(self, call: CollectiveCall, nbytes: int) -> bool:
        """Begins a call that all ranks expect, and returns True; otherwise returns False: [E2]."""
        tag = call.tag()
        place = self._place_of(tag)
        if self._followers.get(self._last) != place:
            return False
        self._record(call, tag, nbytes)
        self._step, self._last = tag.step, place
        return True

    def _place_of(self, tag: Tag) -> _Place:
        return tag.signature, tag.bucket, tag.step - self._step

    def _record(self, call: CollectiveCall, tag: Tag, nbytes: int) -> None:
        if self._transport.error is not None:
            raise self._transport.error
        self._transport.recorder.record("begun", -1, call.name, tag, nbytes)

    def _begin(self, call: CollectiveCall, nbytes: int, number: int = 0) -> list[int]:
        """Compares the calls of the ranks, and gathers a number of each rank: [E3]."""
        transport, tag = self._transport, call.tag()
        self._record(call, tag, nbytes)
        header, headers = self._header, self._headers
        header[:] = tag.signature, tag.step, tag.bucket, number
        request = self._comparisons.Iallgather(header, headers)
        self._wait(call, request, "start", header, headers, have_all_called=False)
        rows = headers.tolist()
        local = rows[self._rank][:-1]
        for peer, row in enumerate(rows):
            if row[:-1] != local:
                raise event_loop.run(transport.abort_on_mismatch(peer, tag))
        self._followers[self._last] = place = self._place_of(tag)
        self._step, self._last = tag.step, place
        return [row[-1] for row in rows]

    def _all_reduce(
        self, call: CollectiveCall, flat: Array, op: np.ufunc, *, have_all_called: bool = True
    ) -> None:
        native = self._native_op(flat.dtype, op)
        for piece in _pieces(flat):
            if native is None:
                self._reduce_chunks(call, piece, op)
                continue
            request = self._communicator.Iallreduce(self._mpi.IN_PLACE, piece, native)
            self._wait(call, request, "all-reduce", piece, have_all_called=have_all_called)
            have_all_called = True

    def _native_op(self, dtype: np.dtype[Any], op: np.ufunc) -> Any:
        """Returns the operator of MPI; None if the ranks have to reduce with numpy."""
        if dtype.char not in _NATIVE or self._wire_format is not None:
            return None
        mpi = self._mpi
        if op in (np.add, np.multiply):
            return mpi.SUM if op is np.add else mpi.PROD
        if dtype.kind in "iu":
            return mpi.MIN if op is np.minimum else mpi.MAX
        return None

    def _reduce_chunks(self, call: CollectiveCall, flat: Array, op: np.ufunc) -> None:
        """Reduces a buffer with numpy, in place: [R1] to [R3].

        With a wire format, the rank that reduces a chunk also keeps the rounded result, as all
        others do.
        """
        wire = self._wire_format or no_compression(flat.dtype)
        slices = chunk_slices(flat.size, self._size)
        own = flat[slices[self._rank]]
        encoded = wire.encode(flat)
        received = np.empty((self._size, own.size), wire.dtype)
        parts = [bytes_of(encoded[part]) for part in slices]
        self._exchange(call, parts, list(map(bytes_of, received)), max(map(len, parts)))  # [R1]
        for peer in range(self._size):
            if peer != self._rank:
                wire.reduce(own, received[peer], op)  # [R2]
        result = np.empty(flat.size, wire.dtype)
        result[slices[self._rank]] = wire.encode(own)
        self._gather(call, bytes_of(result), list(map(len, parts)))  # [R3]
        wire.decode(result, flat)

    def _gather(self, call: CollectiveCall, result: Array, lengths: list[int]) -> None:
        """Fills bytes that consist of a part of each rank; the local part is there already."""
        if result.nbytes <= _PIECE_BYTES:
            request = self._communicator.Iallgatherv(
                self._mpi.IN_PLACE, [result, lengths, self._mpi.BYTE]
            )
            self._wait(call, request, "all-gather", result)
            return
        ends = itertools.accumulate(lengths)
        for root, (end, length) in enumerate(zip(ends, lengths)):
            self._broadcast(call, result[end - length : end], root)

    def _broadcast(self, call: CollectiveCall, data: Array, root: int) -> None:
        for piece in _pieces(data):
            request = self._communicator.Ibcast([piece, self._mpi.BYTE], root)
            self._wait(call, request, "broadcast", piece)

    def _exchange(
        self, call: CollectiveCall, parts: Sequence[Array], slots: Sequence[Array], most: int
    ) -> None:
        """Sends part r to rank r, and receives from each rank into its slot."""
        # `most` is the length of the longest part of any rank, so all make the same calls of MPI
        limit = _PIECE_BYTES // self._size
        for start in range(0, most, limit):
            piece = slice(start, start + limit)
            sent = np.concatenate([part[piece] for part in parts])
            send_lengths = [len(part[piece]) for part in parts]
            lengths = [len(slot[piece]) for slot in slots]
            received = np.empty(sum(lengths), np.uint8)
            request = self._communicator.Ialltoallv(
                [sent, send_lengths, self._mpi.BYTE], [received, lengths, self._mpi.BYTE]
            )
            self._wait(call, request, "exchange", sent, received)
            ends = itertools.accumulate(lengths)
            for slot, end, length in zip(slots, ends, lengths):
                slot[piece] = received[end - length : end]


def _pieces(flat: Array) -> Iterator[Array]:
    length = _PIECE_BYTES // flat.itemsize
    for start in range(0, flat.size, length):
        yield flat[start : start + length]
