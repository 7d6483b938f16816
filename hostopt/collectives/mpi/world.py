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
from hostopt.collectives.ring import all_gather_texts
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
