"""The ranks of a ring as a group of MPI, and two communicators of MPI for each channel.

Collectives of MPI have no tags: those on one communicator are matched by their order. So each
channel has its own communicators, opened at its first call:

    [M1] all ranks agree over the ring that they are in the same call
    [M2] rank 0 takes its lock and tells the others to go on
    [M3] all ranks duplicate the parent communicator twice, without blocking
    [M4] all ranks agree that they have done so, and rank 0 releases its lock

[M2] gives the duplicates one order, whatever the order in which threads of the ranks call.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from hostopt.collectives.call import Channel, CollectiveCall
from hostopt.collectives.messages import CallMessages
from hostopt.collectives.mpi import runtime
from hostopt.collectives.mpi.runtime import wait
from hostopt.collectives.ring import RingGroup
from hostopt.errors import ConfigError, RendezvousTimeoutError
from hostopt.transport import event_loop
from hostopt.transport.base import Transport

# Channels with communicators: MPICH has 2048 in a process. Channels of further names use the ring.
_MAX_CHANNELS = 500
_GROUP_TAG = 0x686F
_POLL_S = 0.05


class World:
    """Opens the communicators of the channels of one ring."""

    def __init__(self, transport: Transport, parent: Any) -> None:
        self._transport = transport
        self._parent = parent  # communicator of MPI over the ranks of the ring, in their order
        self._lock = threading.Lock()  # held on rank 0 during [M2] to [M4]
        self._count = 0

    def open(self, call: CollectiveCall) -> tuple[Any, Any] | None:
        """Opens two communicators of MPI. Collective: all ranks must call it.

        Args:
          call: the first call on the channel, begun, whose messages no other collective uses.

        Returns:
          The communicators; None if a rank has too many.
        """
        may_open = self._count < _MAX_CHANNELS
        if not all(event_loop.run(self._agree(call, 0, may_open))):  # [M1]
            return None
        with self._turn(call):  # [M2]
            opened = self._duplicate(call), self._duplicate(call)  # [M3]
            event_loop.run(self._agree(call, 1, True))  # [M4]
        self._count += 1
        return opened

    def _duplicate(self, call: CollectiveCall) -> Any:
        communicator, request = self._parent.Idup()
        wait(self._transport, call, request, "opening a communicator")
        return communicator

    async def _agree(self, call: CollectiveCall, number: int, flag: bool) -> list[bool]:
        """Gathers a flag of each rank, in messages that no ring collective uses."""
        messages = CallMessages(self._transport, call)
        rank, size = self._transport.rank, self._transport.size
        flags = [flag]
        for index in range(size - 1):
            tag = call.tag(_first_round(size, number) + index)
            await messages.send((rank + 1) % size, tag, bytes([flags[-1]]), "agreement")
            received = await messages.receive((rank - 1) % size, tag, "agreement")
            flags.append(bool(received[0]))
        return flags

    @contextlib.contextmanager
    def _turn(self, call: CollectiveCall) -> Iterator[None]:
        messages, size = CallMessages(self._transport, call), self._transport.size
        tag = call.tag(_first_round(size, 2))
        if self._transport.rank:
            event_loop.run(messages.receive(0, tag, "turn"))
            yield
            return
        while not self._lock.acquire(timeout=_POLL_S):  # its holder has deadlines
            if self._transport.error is not None:
                raise self._transport.error
        try:
            for peer in range(1, size):
                event_loop.run(messages.send(peer, tag, b"", "turn"))
            yield
        finally:
            self._lock.release()


def open_world(channel: Channel) -> World:
    """Starts MPI, unless it runs, and makes the ranks of a ring a group of MPI.

    Collective: all ranks must call it.
    """
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
    call = channel.begin_call("all_gather_bytes", "the ranks of MPI")
    data = memoryview(json.dumps(local).encode())
    texts = RingGroup(channel.transport).all_gather_bytes(call, data)
    places = [json.loads(bytes(text)) for text in texts]
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


def _first_round(size: int, number: int) -> int:
    """Returns the first round of messages after those of all ring collectives."""
    return (2 + number) * size
