"""Makes a task on a node of Ray look like one of this machine.

::

    launcher --- lifeline --- relay: signals ---- actor.signal --+
        `------- pipes ------ relay: events ----- actor.events --+--- supervisor --- command
                                                                      (on the node)

The relay starts commands, signals them and asks for events: output, what the task has written to
its files, and its exit code. Two threads for each task translate. If the launcher ends, however it
does, Ray ends the actor, the supervisor sees the end of its lifeline and kills the command.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from hostopt.launch.engine import supervise
from hostopt.launch.environment import find_command, with_defaults
from hostopt.launch.task_group import start_error
from hostopt.launch.task_process import TaskProcess
from hostopt.options import PREFIX, RING_ENDED
from hostopt.process import error_report
from hostopt.telemetry import progress
from hostopt.transport.addresses import hold_port, port_of
from hostopt.versions import VERSION

# Kinds of events. The data of a code is the number as text, that of an end is empty. A file's kind
# is the variable that names it.
OUT, ERR, CODE, END = "out", "err", "code", "end"
PROGRESS, REPORT = progress.VARIABLE, error_report.VARIABLE
_MAX_QUEUED_BYTES = 4 << 20
_MAX_BATCH_BYTES = 80 << 10  # Ray sends results of up to 100 KiB with the answer itself


class Event(NamedTuple):
    """An event of a task."""

    kind: str
    data: bytes


class EventQueue:
    """Events until the launcher has confirmed them.

    A call whose answer is lost is repeated, so an event is kept until a later call confirms it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._events: deque[Event] = deque()
        self._first = 0  # number of the first event in the queue
        self._queued_bytes = 0

    def put(self, kind: str, data: bytes = b"") -> None:
        """Appends an event; blocks while the launcher does not keep up."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued_bytes < _MAX_QUEUED_BYTES)
            self._events.append(Event(kind, data))
            self._queued_bytes += len(data)
            self._changed.notify_all()

    def get(self, seen: int, timeout_s: float) -> list[Event]:
        """Returns events after the first `seen`, which are dropped; none after the timeout."""
        with self._changed:
            while self._events and self._first < seen:
                self._queued_bytes -= len(self._events.popleft().data)
                self._first += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._events, timeout_s)
            result: list[Event] = []
            nbytes = 0
            for event in self._events:
                nbytes += len(event.data)
                if result and nbytes > _MAX_BATCH_BYTES:
                    break
                result.append(event)
            return result


_CANNOT_START = 2  # as the exit code of the supervisor
_POLL_S = 0.5  # between two looks at the progress, Ray's process of the node, the ring's end
_EVENTS_S = 5.0  # of a call that finds no event
_CHUNK_BYTES = 64 << 10
_KILL_S = 3.0  # from a kill through the actor to a kill of the actor
_UNAVAILABLE_S = 30.0  # without an answer of the actor, before it is lost
_MAX_CHARACTERS = 400
_HANDLE = re.compile(r"\s*(class_name|actor_id|pid|name|namespace|ip|job_id|repr)\s*:")
_FILES = {PROGRESS: "progress.json", REPORT: "error.txt"}
_FROM_LAUNCHER = (PREFIX, "TF_")  # variables of the launcher that override those of the node


class Job(NamedTuple):
    """A task to start."""

    number: int  # counts the tasks of the slot
    command: Sequence[str]
    task: tuple[str, int]
    settings: Mapping[str, str]
    inherited: Mapping[str, str]
    directory: str
    threads: int  # number of processor cores that are reserved for the task


class Opened(NamedTuple):
    """Answer of an actor that holds a port."""

    address: str
    node: str
    version: str


class TaskActor:
    """Runs on a node, and holds a port of it. Without a `host` it asks Ray for its node."""

    def __init__(self, host: str | None = None, node: str = "") -> None:
        if host is None:
            import ray

            host = str(ray.util.get_node_ip_address())
            node = str(ray.get_runtime_context().get_node_id())
            threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        self._host, self._node = host, node
        self._holder = contextlib.ExitStack()
        self._running: _RunningTask | None = None

    def open(self) -> Opened:
        """Holds a port of the node."""
        port = port_of(self._holder.enter_context(hold_port(self._host)))
        return Opened(f"{self._host}:{port}", f"{self._host} ({self._node[:8]})", VERSION)

    def start(self, job: Job) -> None:
        """Starts a task."""
        self._running = _RunningTask(job)

    def events(self, number: int, seen: int) -> list[Event]:
        """Returns the events of a task after the first `seen`; waits a few seconds for one."""
        running = self._running
        if running is None or running.number != number:
            return [Event(END, b"")]
        return running.events.get(seen, _EVENTS_S)

    def signal(self, number: int, signums: Sequence[int]) -> None:
        """Signals a task."""
        running = self._running
        if running is not None and running.number == number and running.process is not None:
            for signum in signums:
                running.process.signal(signum)

    def end_ring(self) -> None:
        """Tells an evaluator that all ranks have succeeded."""
        if self._running is not None:
            open(self._running.ring_ended, "w").close()


class _RunningTask:
    """A task with the threads that turn its output, files and end into events."""

    def __init__(self, job: Job) -> None:
        self.number = job.number
        self.events = EventQueue()
        self._directory = tempfile.TemporaryDirectory(prefix="hostopt-run-")
        path = self._directory.name
        self._files = {kind: os.path.join(path, name) for kind, name in _FILES.items()}
        self.ring_ended = os.path.join(path, "ended")
        self._has_ended = threading.Event()
        self.process: TaskProcess | None = None
        with contextlib.suppress(OSError):  # the launcher's directory is not on this node
            os.chdir(job.directory)
        files = {**self._files, RING_ENDED: self.ring_ended}
        environment = environment_of(job, os.environ, files)
        # the threads of an actor block SIGINT, and a command would inherit that
        blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            supervisor, lifeline = supervise(find_command(job.command), environment)
        except OSError as error:
            self._fail(error)
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        readers = [
            threading.Thread(target=self._read, args=arguments, daemon=True)
            for arguments in ((supervisor.stdout, OUT), (supervisor.stderr, ERR))
        ]
        self.process = TaskProcess(job.task, supervisor, lifeline, readers)
        waiting = threading.Thread(target=self._wait, daemon=True)
        watching = threading.Thread(target=self._watch, daemon=True)
        for thread in (*readers, waiting, watching):
            thread.start()

    def _fail(self, error: OSError) -> None:
        """Reports a task that could not be started, as the launcher does on one machine."""
        code = _CANNOT_START
        if isinstance(error, FileNotFoundError):
            text = f"hostopt: {error} in {os.getcwd()} of node {socket.gethostname()}\n"
            self.events.put(ERR, text.encode(errors="backslashreplace"))
        else:
            failure = start_error(error)
            code = failure.exit_code
            report = f"{code}\n{error_report.cause_of(failure)}"
            self.events.put(REPORT, report.encode(errors="backslashreplace"))
        self.events.put(CODE, b"%d" % code)
        self.events.put(END)

    def _read(self, pipe: IO[bytes], kind: str) -> None:
        with pipe:
            for data in iter(lambda: os.read(pipe.fileno(), _CHUNK_BYTES), b""):
                self.events.put(kind, data)

    def _watch(self) -> None:
        """Reports the progress whenever the task has written it."""
        path, seen = self._files[PROGRESS], 0
        while not self._has_ended.wait(_POLL_S):
            with contextlib.suppress(OSError):
                written = os.stat(path).st_mtime_ns
                if written != seen:
                    seen = written
                    self._report(PROGRESS)

    def _report(self, kind: str) -> None:
        with contextlib.suppress(OSError), open(self._files[kind], "rb") as file:
            self.events.put(kind, file.read())

    def _wait(self) -> None:
        assert self.process is not None
        while not self.process.has_ended():
            pass
        self._has_ended.set()
        for kind in _FILES:
            self._report(kind)
        self.events.put(CODE, b"%d" % (self.process.code or 0))
        self.process.close()
        self.events.put(END)
        self._directory.cleanup()


def environment_of(job: Job, node: Mapping[str, str], files: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of a task.

    These are the variables of the node, the launcher's variables that the node lacks or that are
    options of hostopt or TensorFlow, and the settings of the task.
    """
    launcher = {k: v for k, v in job.inherited.items() if not k.startswith("RAY_")}
    chosen = {k: v for k, v in launcher.items() if k.startswith(_FROM_LAUNCHER)}
    settings = {name: files.get(name, value) for name, value in job.settings.items()}
    threads = {name: str(job.threads) for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")}
    return with_defaults({**threads, **launcher, **node, **chosen, **settings}, job.task[0], 1)


def _end_with(parent: int) -> None:
    """Ends this process if Ray's process of the node ends, which Ray itself may fail to do."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)  # the end of the lifeline kills the task


@dataclass(eq=False, repr=False)  # the job has the token
class RelayedSupervisor:
    """The supervisor of a task on a node."""

    _ray: Any
    _actor: Any
    _node: str
    _job: Job  # the task to start; its settings name files of this machine
    _on_lost: Callable[[], None]

    def __post_init__(self) -> None:
        self.lifeline, self._end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end.settimeout(_POLL_S)
        pipes = [os.pipe() for _ in range(2)]
        readers: list[IO[bytes] | None] = [os.fdopen(reader, "rb") for reader, _ in pipes]
        self.stdout, self.stderr = readers
        self._writers = dict(zip((OUT, ERR), (writer for _, writer in pipes)))
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
                    if event.kind == END:
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
        elif event.kind in _FILES:
            self._replace(event.kind, event.data)
        elif event.kind == CODE:
            self._finish(int(event.data))

    def _write(self, fd: int, data: bytes) -> None:
        rest = memoryview(data)
        with contextlib.suppress(OSError):  # the launcher reads no more
            while rest:
                rest = rest[os.write(fd, rest) :]

    def _replace(self, kind: str, data: bytes) -> None:
        path = self._job.settings[kind]
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
            self._replace(REPORT, report)
        self._finish(128 + signal.SIGKILL)

    def _finish(self, code: int) -> None:
        self._code = code
        self._ended.set()
        with contextlib.suppress(OSError):  # the launcher has closed its end
            self._end.send(b"code %d" % code)
            self._end.shutdown(socket.SHUT_WR)

    def _forward(self) -> None:
        """Forwards signals, and the end of the ring to an evaluator."""
        ring_ended = self._job.settings.get(RING_ENDED)
        signums = None
        with contextlib.suppress(self._ray.exceptions.RayError):  # `_follow` sees it, too
            while signums != b"":
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
            self._end.close()


def describe(error: Exception) -> str:
    """Returns the message of Ray's error in one line, without the handle of the actor."""
    lines = [line for line in str(error).splitlines() if not _HANDLE.match(line)]
    text = " ".join(" ".join(lines).split())
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
