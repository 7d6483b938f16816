"""Messages that have arrived, and the one place where a rank waits for another."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from hostopt.cluster import Cluster
from hostopt.errors import CollectiveTimeoutError, HostOptError, PeerLostError
from hostopt.options import Options

if TYPE_CHECKING:
    from hostopt.transport.base import Tag

__all__: list[str] = []

_log = logging.getLogger(__name__)

# How long it may take to find out why a wait has come to its deadline.
_DIAGNOSIS_S = 5.0
# After so long, and then at doubled times, a rank asks whether the peer makes the same call.
_COMPARE_AFTER_S = 0.25


class Wait(NamedTuple):
    """A wait for a peer that has begun and not ended.

    Args:
      peer: rank that is waited for.
      tag: what is waited for.
      what: the same in words.
      since_s: when it began, on the monotonic clock.
    """

    peer: int
    tag: Tag
    what: str
    since_s: float


class Mailbox:
    """Messages by sender and tag; waits end with a message, an error or a deadline.

    Args:
      cluster: the ring, for the names of peers.
      options: `stall_warning_s` and `collective_timeout_s`.
      on_stall: called from any thread when it is time to warn of a wait, and, with True, when it
        has come to its deadline: then it has the ring failed, with what it finds out.
      on_long_wait: called from any thread when it is time to compare calls with the peer's.
    """

    def __init__(
        self,
        cluster: Cluster,
        options: Options,
        on_stall: Callable[[Wait, bool], None],
        on_long_wait: Callable[[Wait], None],
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._on_stall = on_stall
        self._on_long_wait = on_long_wait
        self._messages: dict[tuple[int, ...], tuple[Tag, memoryview]] = {}
        self._left: dict[int, str] = {}
        self._finished: dict[int, Tag] = {}
        self._resumed_step = -1  # markers up to this one are of work that all have finished
        self._waits: dict[object, Wait] = {}
        self._awaited: dict[tuple[int, ...], asyncio.Future[None]] = {}  # by message, on the loop
        self._on_failure: list[Callable[[HostOptError], None]] = []
        self._lock = threading.RLock()  # a handler of signals may come at any time
        self.error: HostOptError | None = None

    def put(self, peer: int, tag: Tag, payload: memoryview) -> None:
        """Store a message that has arrived from `peer`, or note that it has finished its work."""
        with self._lock:
            if not tag.is_finish_marker:
                self._messages[_key(peer, tag)] = tag, payload
                self._wake(_key(peer, tag))
            elif tag.step > self._resumed_step:  # a marker can be slower than the barrier itself
                self._finished[peer] = tag
                self._wake(*self._awaited)

    async def take(self, peer: int, tag: Tag, what: str) -> tuple[Tag, memoryview]:
        """Wait for the message of `peer` with `tag`, in whose own tag the layout may differ."""
        key = _key(peer, tag)
        if key not in self._messages:
            with self.waiting(peer, tag, what) as check:
                await self._until_here(key, check)
        return self._messages.pop(key)

    async def _until_here(self, key: tuple[int, ...], check: Callable[[], float]) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                with self._lock:  # between the look and the future nothing may arrive
                    if key in self._messages:
                        return
                    timer = loop.call_later(check(), self._wake, key)
                    changed = self._awaited[key] = loop.create_future()
                try:
                    await changed
                finally:
                    timer.cancel()
        finally:
            with self._lock:
                self._awaited.pop(key, None)

    def _wake(self, *keys: tuple[int, ...]) -> None:
        """Have those who await these messages look again; from any thread."""
        for key in keys:
            changed = self._awaited.get(key)
            if changed is not None and _is_running(changed.get_loop()):
                _settle(changed)
            elif changed is not None:
                changed.get_loop().call_soon_threadsafe(_settle, changed)

    @contextlib.contextmanager
    def waiting(self, peer: int, tag: Tag, what: str) -> Iterator[Callable[[], float]]:
        """Wait for a peer by any means: who waits calls what this yields again and again.

        Args:
          peer: rank that is waited for.
          tag: what is waited for.
          what: the same in words, for warnings and errors.

        Yields:
          Function that warns where it is time, raises where waiting is in vain, and else returns
          how many seconds may pass until the next call.
        """
        wait = Wait(peer, tag, what, time.monotonic())
        warn_after_s, compare_after_s = self._options.stall_warning_s, _COMPARE_AFTER_S
        timeout_s = self._options.collective_timeout_s
        given_up = False

        def check() -> float:
            nonlocal warn_after_s, compare_after_s, given_up
            self._raise_if_hopeless(peer, tag, what)
            waited_s = time.monotonic() - wait.since_s
            if waited_s >= timeout_s + _DIAGNOSIS_S:
                raise self.timeout(wait, peer, "")
            if waited_s >= timeout_s:
                if not given_up:
                    given_up = True
                    self._on_stall(wait, True)
                return timeout_s + _DIAGNOSIS_S - waited_s
            if waited_s >= warn_after_s:
                self._on_stall(wait, False)
                while waited_s >= warn_after_s:
                    warn_after_s *= 2
            if waited_s >= compare_after_s:
                self._on_long_wait(wait)
                while waited_s >= compare_after_s:
                    compare_after_s *= 2
            return min(warn_after_s, compare_after_s, timeout_s) - waited_s

        with self._noted(wait):
            yield check

    def fail(self, error: HostOptError) -> bool:
        """End every wait, now and later, with `error`; False where an earlier error holds."""
        with self._lock:
            if self.error is not None:
                return False
            self.error = error
            self._wake(*self._awaited)
            listeners = list(self._on_failure)
        for listener in listeners:
            try:
                listener(error)
            except Exception:  # the others must hear of it, and the peers
                _log.exception("after an error of the ring: %s", error)
        return True

    def on_failure(self, listener: Callable[[HostOptError], None]) -> Callable[[], None]:
        """Have `listener` called with the error that ends the ring, at once if it has ended.

        Args:
          listener: called once, from any thread.

        Returns:
          Function that takes the listener off again.
        """
        with self._lock:
            self._on_failure.append(listener)
            error = self.error
        if error is not None:
            listener(error)
        return lambda: self._on_failure.remove(listener)

    def leave(self, peer: int, why: str) -> None:
        """Note that `peer` has left in good order: what it sent stays, nothing more will come."""
        with self._lock:
            self._left[peer] = why
            self._wake(*self._awaited)

    def resume(self, step: int) -> None:
        """All have finished `step` together: what comes next is new work."""
        with self._lock:
            self._resumed_step = step
            self._finished = {p: tag for p, tag in self._finished.items() if tag.step > step}

    def forget(self, peer: int) -> None:
        """Drop all that has come from `peer`: it begins anew."""
        with self._lock:
            self._left.pop(peer, None)
            self._finished.pop(peer, None)
            for key in [key for key in self._messages if key[0] == peer]:
                del self._messages[key]

    def waits(self) -> list[Wait]:
        """What this rank waits for at the moment."""
        return list(self._waits.values())

    @contextlib.contextmanager
    def _noted(self, wait: Wait) -> Iterator[None]:
        key = object()
        self._waits[key] = wait
        try:
            yield
        finally:
            del self._waits[key]

    def has_left(self, peer: int) -> bool:
        """True where `peer` has left in good order."""
        with self._lock:
            return peer in self._left

    def _raise_if_hopeless(self, peer: int, tag: Tag, what: str) -> None:
        if self.error is not None:
            raise self.error
        why = self._left.get(peer)
        finished = self._finished.get(peer)
        if why is None and finished is not None and tag.channel != finished.channel:
            why = "it has finished its training, with fewer steps than this rank"
        if why is not None:
            raise PeerLostError(
                f"{self._name(peer)} is gone at {tag} while rank {self._cluster.rank} waited for "
                f"{what or 'its data'}: {why}. Give all ranks the same number of steps",
                **self._facts(peer, tag),
            )

    def timeout(self, wait: Wait, culprit: int, why: str) -> CollectiveTimeoutError:
        """The error of a wait that has come to its deadline.

        Args:
          wait: which one.
          culprit: rank that keeps this one waiting, if only through others.
          why: what was found out, or "".
        """
        timeout_s = self._options.collective_timeout_s
        found = why or f"{self._name(wait.peer)} is connected but sends nothing"
        return CollectiveTimeoutError(
            f"{self.waiting_text(wait)}: {found}. Look what rank {culprit} does, or raise "
            f"collective_timeout_s ({timeout_s:g} s)",
            **self._facts(culprit, wait.tag),
            root_cause=f"{self._name(culprit)} makes no progress",
        )

    def waiting_text(self, wait: Wait) -> str:
        """A wait in words."""
        return (
            f"rank {self._cluster.rank} has waited {time.monotonic() - wait.since_s:.1f} s for "
            f"{wait.what or 'data'} from {self._name(wait.peer)} at {wait.tag}"
        )

    def _name(self, peer: int) -> str:
        return f"rank {peer} ({self._cluster.ring[peer]})"

    def _facts(self, peer: int, tag: Tag) -> dict[str, Any]:
        task = self._cluster.ring[peer]
        return {
            "rank": peer,
            "task": task.name,
            "address": task.address,
            "step": tag.step,
            "bucket": tag.bucket,
        }


def _is_running(loop: asyncio.AbstractEventLoop) -> bool:
    """True in a coroutine or callback of this loop."""
    return asyncio._get_running_loop() is loop


def _settle(changed: asyncio.Future[None]) -> None:
    if not changed.done():
        changed.set_result(None)


def _key(peer: int, tag: Tag) -> tuple[int, ...]:
    return (peer, *tag[:-1])
