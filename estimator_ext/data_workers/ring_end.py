"""The end of the ring, as a process beside it sees it that the ranks need until then."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext.session.preemption import GRACE_S
from hostopt.options import RING_ENDED
from hostopt.transport.addresses import listens

_log = tf.get_logger()

_ASK_EVERY_S = 3.0
_CONNECT_S = 1.0
# Without an answer of a chief that has answered before. A ring that is restarted answers again.
GONE_S = 30.0


class RingEnd:
    """Knows if the ring has ended."""

    def has_come(self) -> bool:
        """Returns True once the ring has ended."""
        raise NotImplementedError

    @contextlib.contextmanager
    def signals_wait(self) -> Iterator[None]:
        """Scope in which this process serves on after SIGTERM, until the ranks have ended.

        A service manager sends it to all processes, and the ranks need data for their last step.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGTERM, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _on_signal(self, signum: int, frame: Any) -> None:
        """Called after SIGTERM."""


def ring_end_of(cluster: hostopt.Cluster, options: hostopt.Options) -> RingEnd:
    """Returns the end of the ring of this process, which is not a rank."""
    path = os.environ.get(RING_ENDED)
    if path is not None:
        return _EndByLauncher(path)
    if cluster.size == 1:
        raise hostopt.ConfigError(
            f"{cluster.task} cannot notice the end of its only rank, {cluster.ring[0]}, which "
            "does not listen. Start both with `hostopt run -np 1 --data-workers 1`, or use two "
            "ranks"
        )
    return _EndOfChief(cluster, options)


class _EndByLauncher(RingEnd):
    """The end of a ring of `hostopt run`, which kills this process if the ring fails."""

    def __init__(self, path: str) -> None:
        self._path = path  # exists once all ranks have succeeded

    def has_come(self) -> bool:
        return os.path.exists(self._path)


class _EndOfChief(RingEnd):
    """The end of a chief that answers as it does to `hostopt status`."""

    def __init__(self, cluster: hostopt.Cluster, options: hostopt.Options) -> None:
        self._chief = cluster.ring[0]
        self._options = options
        self._was_seen = False
        self._next_s = self._seen_s = time.monotonic()
        self._ends_s = float("inf")  # after a signal

    def has_come(self) -> bool:
        now_s = time.monotonic()
        if now_s > self._ends_s:
            raise SystemExit(128 + signal.SIGTERM)
        if now_s < self._next_s:
            return False
        # a short training must not be missed
        self._next_s = now_s + (_ASK_EVERY_S if self._was_seen else 0.0)
        if self._answers():
            self._was_seen, self._seen_s = True, now_s
            return False
        silent_s = now_s - self._seen_s
        if self._ends_s < float("inf") and self._was_seen:
            raise SystemExit(128 + signal.SIGTERM)
        if self._was_seen and silent_s >= GONE_S:
            _log.info("%s has not answered for %.0f s: this process ends", self._chief, silent_s)
            return True
        limit_s = self._options.evaluator_timeout_s
        if not self._was_seen and silent_s >= limit_s:
            raise hostopt.RendezvousTimeoutError(
                f"{self._chief} has not appeared within {limit_s:g} s. Check its output, or raise "
                "evaluator_timeout_s if it needs longer to start",
                task=self._chief.name,
                address=self._chief.address,
            )
        return False

    def _answers(self) -> bool:
        from hostopt.transport.grpc.observer import observe  # it imports gRPC

        try:
            observe(self._chief.address, self._options)
        except hostopt.PeerLostError:
            return listens(self._chief.address, _CONNECT_S)  # it may be busy or stopped
        except hostopt.ProtocolError:
            if not self._was_seen:
                raise
            return False  # another program has its port now
        return True

    def _on_signal(self, signum: int, frame: Any) -> None:
        del signum, frame
        self._ends_s = min(self._ends_s, time.monotonic() + GRACE_S)
        self._next_s = 0.0
