"""Makes a task on a node of Ray look like one of this machine.

::

    launcher --- lifeline --- relay: signals ---- actor.signal --+
        `------- pipes ------ relay: events ----- actor.events --+--- supervisor --- command
                                                                      (on the node)

Two threads for each task translate. If the actor is lost, with its node or without, the task
counts as killed by SIGKILL, and its report says which node it was.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from hostopt.launch import ray_actor
from hostopt.launch.ray_actor import Event, Job
from hostopt.options import RING_ENDED
from hostopt.process import error_report
from hostopt.telemetry import progress

_POLL_S = 0.5  # between two looks for the end of the ring
_KILL_S = 3.0  # from a kill through the actor to a kill of the actor
_UNAVAILABLE_S = 30.0  # without an answer of the actor, before it is lost
_MAX_CHARACTERS = 400
_HANDLE = re.compile(r"\s*(class_name|actor_id|pid|name|namespace|ip|job_id|repr)\s*:")


class RelayedSupervisor:
    """The supervisor of a task on a node.

    Args:
      job: the task to start; its settings name files of this machine.
    """

    def __init__(
        self, ray: Any, actor: Any, node: str, job: Job, on_lost: Callable[[], None]
    ) -> None:
        self.lifeline, self._end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end.settimeout(_POLL_S)
        pipes = [os.pipe() for _ in range(2)]
        self.stdout, self.stderr = (os.fdopen(reader, "rb") for reader, _ in pipes)
        self._writers = dict(zip((ray_actor.OUT, ray_actor.ERR), (w for _, w in pipes)))
        self._ray = ray
        self._actor = actor
        self._node = node
        self._job = job
        self._on_lost = on_lost
        self._code = -signal.SIGKILL
        self._ended = threading.Event()
        self._is_killed = False
        self._threads = [
            threading.Thread(target=target, daemon=True)
            for target in (self._follow, self._forward)
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the task, and returns its exit code."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(list(self._job.command), timeout or 0.0)
        return self._code

    def kill(self) -> None:
        """Kills the actor if it does not kill the task, as it is told through the lifeline."""
        if not self._is_killed:
            self._is_killed = True
            threading.Thread(target=self._kill, daemon=True).start()

    def join(self, timeout_s: float) -> None:
        """Waits for the threads of a task that has been closed, and whose actor has ended."""
        for thread in self._threads:
            thread.join(timeout_s)

    def _kill(self) -> None:
        if not self._ended.wait(_KILL_S):
            self._ray.kill(self._actor)
            self._lose("")

    def _follow(self) -> None:
        """Starts the task, and turns its events into what the launcher expects."""
        seen = 0
        try:
            self._ray.get(self._actor.start.remote(self._job))
            while True:
                events = self._next_events(seen)
                seen += len(events)
                for event in events:
                    if event.kind == ray_actor.END:
                        return
                    self._handle(event)
        except self._ray.exceptions.RayError as error:
            self._lose(f"node {self._node} lost this task: {describe(error)}")
        finally:
            for writer in self._writers.values():
                os.close(writer)

    def _next_events(self, seen: int) -> list[Event]:
        deadline_s = time.monotonic() + _UNAVAILABLE_S
        while True:
            try:
                call = self._actor.events.remote(self._job.number, seen)
                return list(self._ray.get(call))
            except self._ray.exceptions.ActorUnavailableError:
                if self._ended.is_set() or time.monotonic() > deadline_s:
                    raise
                time.sleep(_POLL_S)

    def _handle(self, event: Event) -> None:
        if event.kind in self._writers:
            self._write(self._writers[event.kind], event.data)
        elif event.kind == ray_actor.PROGRESS:
            self._replace(self._job.settings[progress.VARIABLE], event.data)
        elif event.kind == ray_actor.REPORT:
            self._replace(self._job.settings[error_report.VARIABLE], event.data)
        elif event.kind == ray_actor.CODE:
            self._finish(int(event.data))

    def _write(self, fd: int, data: bytes) -> None:
        rest = memoryview(data)
        with contextlib.suppress(OSError):  # the launcher reads no more
            while rest:
                rest = rest[os.write(fd, rest) :]

    def _replace(self, path: str, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk, or the attempt is over
            with open(f"{path}.new", "wb") as file:
                file.write(data)
            os.replace(f"{path}.new", path)

    def _lose(self, cause: str) -> None:
        if self._ended.is_set():
            return
        self._on_lost()
        if cause and not self._is_killed:
            report = f"{128 + signal.SIGKILL}\n{cause}".encode(errors="backslashreplace")
            self._replace(self._job.settings[error_report.VARIABLE], report)
        self._finish(128 + signal.SIGKILL)

    def _finish(self, code: int) -> None:
        self._code = code
        self._ended.set()
        with contextlib.suppress(OSError):  # the launcher has closed its end
            self._end.send(b"code %d" % code)
            self._end.shutdown(socket.SHUT_WR)

    def _forward(self) -> None:
        """Forwards signals, and the end of the ring to an evaluator."""
        with contextlib.suppress(self._ray.exceptions.RayError):  # `_follow` sees it, too
            self._forward_to_actor()

    def _forward_to_actor(self) -> None:
        ring_ended = self._job.settings.get(RING_ENDED)
        while True:
            try:
                signums = self._end.recv(64)
            except socket.timeout:
                if ring_ended is not None and os.path.exists(ring_ended):
                    self._actor.end_ring.remote()
                    ring_ended = None
                continue
            except OSError:  # the launcher has closed its end
                signums = b""
            # the end of the lifeline kills the task, as on one machine
            self._actor.signal.remote(self._job.number, list(signums) or [signal.SIGKILL])
            if not signums:
                self._end.close()
                return


def describe(error: Exception) -> str:
    """Returns the message of Ray's error in one line, without the handle of the actor."""
    lines = [line for line in str(error).splitlines() if not _HANDLE.match(line)]
    text = " ".join(" ".join(lines).split())
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
