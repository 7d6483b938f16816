"""Ranks that have run out of data: they take part in the calls of the others until the end.

A rank that calls `join` sends a message to every other rank. From then on each of them announces
its calls to that rank, those in progress first. The joined rank makes each announced call once,
with values that change nothing. As long as no rank has joined, nothing is sent.

Calls are matched by name and number. No call ends before all ranks have entered it, so a rank that
joins misses no call that another rank has made already.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hostopt.cluster.cluster import Cluster
from hostopt.collectives.communicator import Communicator
from hostopt.errors import CollectiveMismatchError, ConfigError, HostOptError, PeerLostError
from hostopt.transport import event_loop
from hostopt.transport.mailbox import Listener
from hostopt.transport.message import Tag

_CHANNEL = "ranks that have joined"


class Announcement(NamedTuple):
    """A call of another rank that this rank has to take part in."""

    peer: int
    kind: str  # of name; each kind has a function that replays its calls
    name: str
    number: int  # of the call among those of its name, from 0
    details: dict[str, Any]  # what a rank without data needs to make the call, as JSON


class Joining:
    """Lets ranks without data wait for the others, and take part in their calls."""

    def __init__(self, communicator: Communicator) -> None:
        self._transport = communicator.transport
        self._agreement = communicator.duplicate("the rank that joins last")
        self._replays: dict[str, Callable[[Announcement], None]] = {}  # by kind
        # reentrant, as the ring may be aborted by a signal handler
        self._changed = threading.Condition(threading.RLock())
        self._made: dict[tuple[str, str], int] = {}  # number of calls by kind and name
        self._in_progress: dict[tuple[str, str], Callable[[], dict[str, Any]]] = {}
        self._round = 0  # rounds that all ranks have joined
        self._joined: dict[int, set[int]] = {}  # other ranks by round
        self._clock: dict[int, int] = {}  # Lamport's, by round: the largest time of a join
        self._gone: list[int] = []  # ranks that have left the ring
        self._is_joined = False
        self._workers: dict[tuple[str, str], _Worker] | None = None  # while this rank waits
        self._error: BaseException | None = None
        self._channel = self._transport.open_channel(_CHANNEL)
        self._sent = itertools.count()
        self._transport.mailbox.listen(self._channel, Listener(self._receive, self._note_gone))

    def replay_with(self, kind: str, replay: Callable[[Announcement], None]) -> None:
        """Sets the function that takes part in the calls of a kind, on a thread for each name."""
        self._replays[kind] = replay

    def begin(self, kind: str, name: str, details: Callable[[], dict[str, Any]] = dict) -> None:
        """Notes that this rank begins a call, and announces it to ranks that have joined.

        The call of this name before must have ended. `details` returns what `Announcement.details`
        is to be, and is called only if it is needed.
        """
        if isinstance(threading.current_thread(), _Worker):
            return
        with self._changed:
            if self._is_joined:
                raise ConfigError(
                    f"rank {self._transport.rank} makes the call {name!r} in one thread while "
                    "join() waits in another. Make it before or after join()"
                )
            self._in_progress[kind, name] = details
            joined = self._joined.get(self._round)
            if joined:
                self._announce([(kind, name)], sorted(joined))

    def end(self, kind: str, name: str) -> None:
        """Notes the end of a call."""
        with self._changed:
            self._in_progress.pop((kind, name), None)
            self._made[kind, name] = self._made.get((kind, name), 0) + 1

    def join(self) -> int:
        """Takes part in the calls of others until all have joined; returns the last one's rank.

        Collective: all ranks must call it, but in the meantime ranks may make other calls.
        """
        if self._transport.size == 1:
            return self._transport.rank
        others = {*range(self._transport.size)} - {self._transport.rank}
        with self._changed:
            self._check_idle()
            self._is_joined, self._workers = True, {}
            joined = self._joined.setdefault(self._round, set())
            time = self._clock.get(self._round, 0) + 1
            self._send(others, {"round": self._round, "time": time})
        stop_listening = self._transport.mailbox.on_failure(self._fail)
        try:
            with self._changed:
                while joined != others:
                    self._raise_if_hopeless(joined)
                    self._changed.wait()
        finally:
            stop_listening()
            workers = self._stop_workers()
        for worker in workers:  # the others have ended their calls; so do these
            worker.join()
        self._raise_if_hopeless(others)
        times = self._agreement.all_gather(np.array(time), "the rank that joins last").tolist()
        with self._changed:
            del self._joined[self._round], self._clock[self._round]
            self._round += 1
            self._is_joined = False
        return max(range(len(times)), key=lambda rank: (times[rank], rank))

    def _check_idle(self) -> None:
        if self._is_joined:
            raise ConfigError("join() is called in two threads at the same time. Call it in one")
        if self._in_progress:
            _, name = next(iter(self._in_progress))
            raise ConfigError(
                f"rank {self._transport.rank} calls join() while another of its threads is in "
                f"the call {name!r}. Wait for the end of that call first"
            )

    def _raise_if_hopeless(self, joined: set[int]) -> None:
        error = self._error
        gone = [peer for peer in self._gone if peer not in joined]
        if error is None and gone:
            cluster = self._transport.cluster
            error = PeerLostError(
                f"{cluster.describe(gone[0])} has left the ring while rank {cluster.rank} waited "
                "for it in join(). Call join() on all ranks before they end",
                **cluster.attributes(gone[0]),
            )
        if error is not None:
            self._transport.abort(error)
            raise self._transport.error or error

    # -- messages ----------------------------------------------------------------------------

    def _send(self, peers: set[int] | list[int], message: dict[str, Any]) -> None:
        payload = json.dumps(message).encode()
        for peer in peers:
            tag = Tag(self._channel, next(self._sent))
            event_loop.start(self._transport.send(peer, tag, payload, _CHANNEL))

    def _announce(self, calls: list[tuple[str, str]], peers: list[int]) -> None:
        for call in calls:
            kind, name = call
            details = self._in_progress[call]()
            announcement = Announcement(
                self._transport.rank, kind, name, self._made.get(call, 0), details
            )
            self._send(peers, announcement._asdict())

    def _receive(self, peer: int, payload: memoryview) -> None:
        message = json.loads(bytes(payload))
        with self._changed:
            if "round" in message:
                number = message["round"]
                self._joined.setdefault(number, set()).add(peer)
                self._clock[number] = max(self._clock.get(number, 0), message["time"])
                self._announce(list(self._in_progress), [peer])
                self._changed.notify_all()
            elif self._workers is not None:
                announcement = Announcement(**message)
                call = announcement.kind, announcement.name
                if call not in self._workers:
                    self._workers[call] = _Worker(self._take_part)
                    self._workers[call].start()
                self._workers[call].announced.put(announcement)

    def _note_gone(self, peer: int) -> None:
        with self._changed:
            self._gone.append(peer)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    # -- calls of other ranks ----------------------------------------------------------------

    def _take_part(self, announcement: Announcement) -> None:
        """Makes a call of other ranks, unless this rank has made it: each of them announces it."""
        made = self._made.get((announcement.kind, announcement.name), 0)
        if announcement.number != made or self._error is not None:
            return
        try:
            replay = self._replays.get(announcement.kind)
            if replay is None:
                raise refusal(
                    announcement,
                    self._transport.cluster,
                    f"reduces the {announcement.kind}",
                    "before it built them. Make one step on every rank before join(), with a loss "
                    "of 0 on a rank without data",
                )
            replay(announcement)
        except BaseException as error:
            self._transport.abort(error)
            self._fail(self._transport.error or error)

    def _stop_workers(self) -> list[_Worker]:
        with self._changed:
            workers, self._workers = list((self._workers or {}).values()), None
        for worker in workers:
            worker.announced.put(None)
        return workers


class _Worker(threading.Thread):
    """Takes part in the calls of one name, in their order."""

    def __init__(self, take_part: Callable[[Announcement], None]) -> None:
        super().__init__(daemon=True, name="hostopt-joined")
        self.announced: queue.SimpleQueue[Announcement | None] = queue.SimpleQueue()
        self._take_part = take_part

    def run(self) -> None:
        for announcement in iter(self.announced.get, None):
            self._take_part(announcement)


def refusal(announcement: Announcement, cluster: Cluster, call: str, reason: str) -> HostOptError:
    """Returns the error of a call that a rank which has joined cannot take part in."""
    assert cluster.rank is not None
    return CollectiveMismatchError(
        f"{cluster.describe(announcement.peer)} {call}, but {cluster.describe(cluster.rank)} has "
        f"joined {reason}",
        **cluster.attributes(announcement.peer),
    )
