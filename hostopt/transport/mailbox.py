"""Messages that have arrived. This is the only place where a rank waits for another.

A rank that waits for a message offers the memory where its payload belongs.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Iterator
from typing import Callable, NamedTuple

import numpy as np

from hostopt.cluster.cluster import Cluster
from hostopt.errors import CollectiveTimeoutError, HostOptError, PeerLostError
from hostopt.options import Options
from hostopt.transport import event_loop
from hostopt.transport.message import Tag
from hostopt.transport.stall import Wait, schedule
from hostopt.transport.wakeup import Wakeup

_log = logging.getLogger(__name__)


class Listener(NamedTuple):
    """Receives the messages of a channel as they arrive; called on any thread, must not block."""

    receive: Callable[[int, memoryview], None]
    left: Callable[[int], None]


class Destination:
    """Memory for the payload of one message."""

    def __init__(self, view: memoryview) -> None:
        self.view = view

    def withdraw(self) -> None:
        """Redirects a payload that is still arriving; its beginning is kept."""
        self.view = memoryview(bytearray(self.view))


class Mailbox:
    """Messages by sender and tag. A wait ends with a message, an error or a deadline.

    Args:
      on_stall: called from any thread with a wait that is due for a warning. It is called with
        True as second argument when the wait has timed out; it then aborts the ring.
      on_long_wait: called from any thread when the calls of this rank and its peer are to be
        compared.
    """

    def __init__(
        self,
        cluster: Cluster,
        options: Options,
        on_stall: Callable[[Wait, bool], object],
        on_long_wait: Callable[[Wait], object],
    ) -> None:
        self.cluster = cluster
        self._options = options
        self._on_stall = on_stall
        self._on_long_wait = on_long_wait
        self._messages: dict[tuple[int, ...], tuple[Tag, memoryview]] = {}
        self._left: set[int] = set()
        self._markers: dict[int, list[Tag]] = {}  # finish markers of its streams, by peer
        self._resumed_step = -1  # finish markers up to this step are outdated
        self._waits: dict[Waiting, None] = {}  # in the order in which they began
        # what waits for each message, and when that wait is to be checked
        self._awaited: dict[tuple[int, ...], tuple[Wakeup, float]] = {}
        self._timer = _Timer(self._check_waits)  # one for all, as most waits end before it
        self._offered: dict[tuple[int, int, Tag], Destination] = {}  # by loop, peer and tag
        self._listeners: dict[int, Listener] = {}  # by channel
        self._on_failure: list[Callable[[HostOptError], object]] = []
        self._lock = threading.RLock()  # reentrant, as a signal handler may run at any time
        self.error: HostOptError | None = None

    def put(self, peer: int, tag: Tag, payload: memoryview) -> bool:
        """Stores a message that has arrived from `peer`, or gives it to a listener.

        Returns False if the coroutine that waits for this message has not continued yet.
        """
        key = _key(peer, tag)
        with self._lock:
            listener = self._listeners.get(tag.channel)
            if listener is None and not tag.is_finish_marker:
                self._messages[key] = tag, payload
            elif listener is None and tag.step > self._resumed_step:  # else the barrier has ended
                markers = [*self._markers.get(peer, ()), tag]
                newest = max(each.step for each in markers)
                self._markers[peer] = [each for each in markers if each.step == newest]
        # without the lock, as what waits may continue in these calls
        if listener is not None:
            listener.receive(peer, payload)
        elif tag.is_finish_marker:
            self._wake_all()
        elif (awaited := self._awaited.get(key)) is not None:
            return awaited[0].wake()
        return True

    def listen(self, channel: int, listener: Listener) -> None:
        """Gives the messages of a channel, earlier ones too, to a listener; nobody waits there."""
        with self._lock:
            self._listeners[channel] = listener
            keys = [key for key in self._messages if key[1] == channel]
            arrived = [(key[0], self._messages.pop(key)[1]) for key in keys]
            left = list(self._left)
        for peer, payload in arrived:
            listener.receive(peer, payload)
        for peer in left:
            listener.left(peer)

    async def take(
        self, peer: int, tag: Tag, name: str, into: memoryview | None = None
    ) -> tuple[Tag, memoryview]:
        """Waits for a message of `peer` and removes it; the signature is not compared.

        Returns the tag as the peer has sent it, and the payload. It is in `into` only if the
        message has not begun to arrive.
        """
        key = _key(peer, tag)
        if key in self._messages:
            return self._messages.pop(key)
        offer = event_loop.current(), peer, tag  # taken on the event loop on which it is made
        if into is not None:
            self._offered[offer] = Destination(into)
        try:
            with self.waiting(peer, tag, name) as check:
                while True:
                    with self._lock:  # nothing may arrive between the test and the wait
                        if key in self._messages:
                            return self._messages.pop(key)
                        check_s = time.monotonic() + check()
                        wakeup = Wakeup()
                        self._awaited[key] = wakeup, check_s
                        if check_s < self._timer.at_s:
                            self._timer.call_at(check_s)
                    await wakeup
        except BaseException:
            if into is not None:
                self._offered[offer].withdraw()
            raise
        finally:
            self._awaited.pop(key, None)
            self._offered.pop(offer, None)

    def destination(self, peer: int, tag: Tag, nbytes: int) -> Destination:
        """Returns memory for a payload: what is offered, if signature and size are the same."""
        offered = self._offered.get((event_loop.current(), peer, tag))
        if offered is None or len(offered.view) != nbytes:
            return Destination(memoryview(np.empty(nbytes, np.uint8)))
        return offered

    def _check_waits(self) -> None:
        """Wakes the coroutines whose waits are due for a check."""
        with self._lock:
            awaited, now_s = list(self._awaited.values()), time.monotonic()
            later_s = [check_s for _, check_s in awaited if check_s > now_s]
            if later_s:
                self._timer.call_at(min(later_s))
        for wakeup, check_s in awaited:
            if check_s <= now_s:
                wakeup.wake()

    def _wake_all(self) -> None:
        """Lets everything that waits for a message look at the reasons to end."""
        for wakeup, _ in list(self._awaited.values()):
            wakeup.wake()

    def waiting(self, peer: int, tag: Tag, name: str, grace_s: float = 0.0) -> Waiting:
        """Registers a wait for a peer, by any means, in a scope; see `Waiting`.

        If the peer leaves in good order, the wait goes on for `grace_s`: its data may still come.
        """
        wait = Wait(peer, tag, name, time.monotonic())
        due = schedule(wait, self._options, self._on_stall, self._on_long_wait)
        return Waiting(self, wait, due, grace_s)

    def poll(
        self,
        peer: int,
        tag: Tag,
        name: str,
        has_ended: Callable[[], bool],
        sleep: Callable[[], object],
        grace_s: float = 0.0,
    ) -> None:
        """Waits for a peer until `has_ended`, between short sleeps; see `waiting`."""
        with self.waiting(peer, tag, name, grace_s) as check:
            while not has_ended():
                check()
                sleep()

    def fail(self, error: HostOptError) -> bool:
        """Ends all present and future waits with `error`; False if an earlier one is in effect."""
        with self._lock:
            if self.error is not None:
                return False
            self.error = error
            listeners = list(self._on_failure)
        for listener in listeners:
            try:
                listener(error)
            except Exception:  # the other listeners and the peers must still be notified
                _log.exception("a listener failed after the ring was aborted: %s", error)
        self._wake_all()  # last, as a dump shows what this rank waited for
        return True

    def on_failure(self, listener: Callable[[HostOptError], object]) -> Callable[[], None]:
        """Calls `listener`, on any thread, once the ring is aborted; returns its removal."""
        with self._lock:
            self._on_failure.append(listener)
            error = self.error
        if error is not None:
            listener(error)
        return lambda: self._on_failure.remove(listener)

    def mark_left(self, peer: int) -> None:
        """Notes that `peer` has left in good order: its messages stay, and no more will come."""
        with self._lock:
            self._left.add(peer)
            listeners = list(self._listeners.values())
        self._wake_all()
        for listener in listeners:
            listener.left(peer)

    def has_left(self, peer: int) -> bool:
        """Returns True if `peer` has left in good order."""
        with self._lock:
            return peer in self._left

    def resume(self, step: int) -> None:
        """Discards the finish markers up to `step`, which all ranks have finished together."""
        with self._lock:
            self._resumed_step = step
            self._markers = {p: tags for p, tags in self._markers.items() if tags[0].step > step}

    def forget(self, peer: int) -> None:
        """Removes all messages and notes of `peer`, whose process has started again."""
        with self._lock:
            self._left.discard(peer)
            self._markers.pop(peer, None)
            for key in [key for key in self._messages if key[0] == peer]:
                del self._messages[key]

    def waits(self) -> list[Wait]:
        """Returns the present waits of this rank."""
        return [waiting.wait for waiting in list(self._waits)]

    def reason_of_end(self, peer: int, tag: Tag) -> str | None:
        """Returns why no message of this tag will come from a peer; None if it may."""
        if self.error is not None:
            raise self.error
        if peer in self._left:
            return "it has closed its communicator"
        markers = self._markers.get(peer, [])
        has_finished = bool(markers) and len(markers) > markers[0].chunk
        if has_finished and tag.channel != markers[0].channel:
            return "it has finished after fewer steps than this rank"
        return None

    def timeout_error(self, wait: Wait, culprit: int, reason: str) -> CollectiveTimeoutError:
        """Builds the error of a wait that has reached its deadline."""
        timeout_s = self._options.collective_timeout_s
        reason = reason or f"{self.cluster.describe(wait.peer)} is connected but sends nothing"
        return CollectiveTimeoutError(
            f"{self.describe(wait)}: {reason}. Check what rank {culprit} is doing, or raise "
            f"collective_timeout_s ({timeout_s:g} s)",
            **self.cluster.attributes(culprit, step=wait.tag.step, bucket=wait.tag.bucket),
            root_cause=f"{self.cluster.describe(culprit)} makes no progress",
        )

    def describe(self, wait: Wait) -> str:
        """Returns a wait as logs and errors show it."""
        return (
            f"rank {self.cluster.rank} has waited {time.monotonic() - wait.since_s:.1f} s for "
            f"{wait.name or 'data'} from {self.cluster.describe(wait.peer)} at {wait.tag}"
        )


class _Timer:
    """Calls a function on event loop 0, at the time that `call_at` was given last."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._handle: asyncio.TimerHandle | None = None
        self.at_s = math.inf  # on the monotonic clock

    def call_at(self, time_s: float) -> None:
        """Sets the time; may be called on any event loop, but by one thread at a time."""
        self.at_s = time_s
        event_loop.call(0, self._set)

    def _set(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        if self.at_s == math.inf:  # it was called since
            return
        left_s = self.at_s - time.monotonic()
        self._handle = asyncio.get_running_loop().call_later(left_s, self._call)

    def _call(self) -> None:
        self.at_s = math.inf
        self._function()


class Waiting:
    """The scope of a wait for a peer, whose waiter calls the function that it is given often.

    The function warns when a warning is due and raises when the wait cannot succeed. Otherwise it
    returns the time in seconds until it has to be called again.
    """

    def __init__(self, mailbox: Mailbox, wait: Wait, due: Iterator[float], grace_s: float) -> None:
        self.wait = wait
        self._mailbox = mailbox
        self._due = due
        self._grace_s = grace_s
        self._grace_end_s = math.inf  # from the first check at which the peer has left

    def __enter__(self) -> Callable[[], float]:
        self._mailbox._waits[self] = None
        return self._check

    def __exit__(self, *_: object) -> None:
        del self._mailbox._waits[self]

    def _check(self) -> float:
        peer, tag, name, _ = self.wait
        reason = self._mailbox.reason_of_end(peer, tag)
        if reason is not None:
            self._grace_end_s = min(self._grace_end_s, time.monotonic() + self._grace_s)
            if time.monotonic() >= self._grace_end_s:
                cluster = self._mailbox.cluster
                raise PeerLostError(
                    f"{cluster.describe(peer)} is gone at {tag} while rank {cluster.rank} "
                    f"waited for {name or 'its data'}: {reason}. Give all ranks the same "
                    "number of steps",
                    **cluster.attributes(peer, step=tag.step, bucket=tag.bucket),
                )
        left_s = next(self._due, None)
        if left_s is None:
            raise self._mailbox.timeout_error(self.wait, peer, "")
        return left_s


def _key(peer: int, tag: Tag) -> tuple[int, ...]:
    return (peer, *tag[:-1])  # without the signature
