"""Rings for tests: ranks as threads over each transport, and ranks as processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import (
    DEADLINE_S,
    LOGS,
    ROOT,
    Process,
    deadline_s,
    jobs_of,
    reserved_addresses,
    task_of,
)

from hostopt.cluster.cluster import Cluster
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.hosts import Hosts
from hostopt.errors import HostOptError
from hostopt.launch.environment import tf_config_of
from hostopt.options import Options
from hostopt.transport import event_loop
from hostopt.transport.grpc.transport import GrpcTransport
from hostopt.transport.inproc import InprocTransport

# Transports of the fixtures with these names. Only the first one is used unless it is night.
TRANSPORTS = {
    "spawn": ["inproc", "grpc", "grpc+tcp", "streams", "shm", "hosts"],
    "spawn_ring": ["inproc", "grpc", "grpc+tcp", "streams"],
}

_STRANGER = "has refused a data connection: another program calls"


def failure(communicator: Communicator, call: Callable[[], Any]) -> HostOptError:
    """Returns the error of a call that must fail, and aborts the other ranks as `with` does."""
    with pytest.raises(HostOptError) as caught:
        call()
    communicator.abort(caught.value)
    return caught.value


class Spawn:
    """Runs a function as every rank of a ring, each rank a thread.

    Args:
      transport: ``inproc``; ``grpc`` and ``grpc+tcp`` over real loopback sockets, and ``streams``,
        which is ``grpc+tcp`` with three streams; ``shm``, all ranks on one host; ``hosts``, two
        ranks on each host.
    """

    def __init__(self, transport: str) -> None:
        self.transport = transport

    @property
    def _has_sockets(self) -> bool:
        return self.transport.startswith(("grpc", "streams"))

    def __call__(self, size: int, fn: Callable[[Communicator], Any], **options: Any) -> list[Any]:
        """Returns the results of `fn` in rank order; `options` are fields of `Options`.

        The first exception of a rank aborts the others, and is raised after all have ended.
        """
        limit_s = deadline_s(DEADLINE_S)
        defaults: dict[str, Any] = {
            "collective_timeout_s": limit_s,
            "rendezvous_timeout_s": limit_s,
        }
        if self._has_sockets:
            defaults["communication"] = self.transport.replace("streams", "grpc+tcp")
            defaults["streams"] = 3 if self.transport == "streams" else 1
        results: list[Any] = [None] * size
        errors: list[BaseException] = []
        communicators: list[Communicator] = []

        def note(error: BaseException) -> None:
            errors.append(error)
            if error is errors[0]:
                with contextlib.suppress(Exception):  # tasks may end meanwhile
                    _print_state(communicators)

        def run(rank: int) -> None:
            try:
                communicator = connect(rank)
            except BaseException as error:
                note(error)
                return
            communicators.append(communicator)
            try:
                results[rank] = fn(communicator)
            except BaseException as error:
                note(error)
                communicator.abort(error)
            finally:
                communicator.close()

        with self._ring(size, Options(**{**defaults, **options})) as connect:
            threads = [
                threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True)
                for rank in range(size)
            ]
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + 3 * limit_s
            for thread in threads:
                thread.join(max(deadline - time.monotonic(), 0))
            stuck = [thread.name for thread in threads if thread.is_alive()]
        if errors:
            raise errors[0]
        assert not stuck, f"{', '.join(stuck)} did not end"
        return results

    @contextlib.contextmanager
    def _ring(self, size: int, options: Options) -> Iterator[Callable[[int], Communicator]]:
        if not self._has_sockets:
            transports = InprocTransport.connect(size, options)
            hosts = self._hosts(size)
            yield lambda rank: Communicator(transports[rank], hosts=hosts)
            return
        with reserved_addresses(size) as addresses:
            jobs = jobs_of(addresses)
            yield lambda rank: Communicator(
                GrpcTransport(Cluster.from_dict(jobs, *task_of(rank)), options)
            )

    def _hosts(self, size: int) -> Hosts | None:
        per_host = {"inproc": 1, "shm": size, "hosts": 2}[self.transport]
        ranks = range(size)
        groups = tuple(tuple(ranks[i : i + per_host]) for i in range(0, size, per_host))
        return Hosts(groups) if len(groups) < size else None


def _print_state(communicators: Sequence[Communicator]) -> None:
    """Prints what all ranks do when the first of them fails, for the output of the test."""
    for communicator in communicators:
        print(f"rank {communicator.rank}: {communicator.transport.status()}")
    for task in asyncio.all_tasks(event_loop._loop(0)):
        task.print_stack(file=sys.stdout)


class RankProcess:
    """One rank as a process, in a process group of its own.

    Args:
      script: Python source; `sys.argv[1:]` are `arguments`.
      task: name of its task, such as ``worker:0``.
      errors: file for its standard error.
      through: program and arguments that run another one, such as ``ip netns exec <name>``.
    """

    def __init__(
        self,
        script: str,
        task: str,
        environ: dict[str, str],
        errors: Path,
        arguments: tuple[object, ...],
        through: Sequence[str] = (),
    ) -> None:
        self.task = task
        self._errors = errors
        LOGS.append((task, errors))
        with errors.open("w") as stderr:
            self.process = Process(
                [*through, sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )

    def line(self) -> str:
        """Returns the next printed line; empty at the end.

        Skips warnings about calls of another program. A test that runs beside this one may call a
        port that it had before.
        """
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        return next((line for line in lines if _STRANGER not in line), "").rstrip("\n")

    def expect(self, line: str) -> None:
        """Waits for the next line, which must be `line`."""
        result = self.line()
        assert result == line, f"{self.task} printed {result!r} and to stderr:\n{self.stderr}"

    def write_line(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def close_stdin(self) -> None:
        """Closes standard input, so that `sys.stdin.read()` in the script returns."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def exit_code(self, limit_s: float = DEADLINE_S) -> int:
        """Waits for the end, and returns the exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.task} did not end in time; its stderr:\n{self.stderr}")

    @property
    def stderr(self) -> str:
        """Standard error so far."""
        return self._errors.read_text()

    def end(self) -> bool:
        """Kills and reaps the process group; returns True if a process was still running."""
        running = self.process.poll() is None
        if not running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 0)
                running = True  # children of the rank
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return running


class RankProcesses:
    """A ring of processes on reserved ports.

    Args:
      through: command that starts each rank, if necessary; see `RankProcess`.
    """

    def __init__(
        self, addresses: list[str], directory: Path, through: Sequence[Sequence[str]] = ()
    ) -> None:
        self.addresses = addresses
        self.directory = directory
        self._through = through
        self._started: list[RankProcess] = []

    def name(self, rank: int) -> str:
        """Returns the name of a rank in messages."""
        type_, index = task_of(rank)
        return f"rank {rank} ({type_}:{index}, {self.addresses[rank]})"

    def start(
        self,
        rank: int,
        script: str,
        *arguments: object,
        jobs: dict[str, list[str]] | None = None,
        **environ: str,
    ) -> RankProcess:
        """Starts one rank.

        Args:
          jobs: "cluster" of its TF_CONFIG, if it differs from the other ranks.
        """
        type_, index = task_of(rank)
        limit_s = str(deadline_s(DEADLINE_S / 2))
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HOSTOPT_")}
        process = RankProcess(
            script,
            f"{type_}:{index}",
            {
                **inherited,
                "PYTHONPATH": str(ROOT),
                "TF_CONFIG": tf_config_of(jobs or jobs_of(self.addresses), (type_, index)),
                "HOSTOPT_RENDEZVOUS_TIMEOUT_S": limit_s,
                "HOSTOPT_COLLECTIVE_TIMEOUT_S": limit_s,
                "HOSTOPT_COMMUNICATION": "grpc",
                **environ,
            },
            self.directory / f"stderr.{len(self._started)}",
            arguments,
            self._through[rank] if self._through else (),
        )
        self._started.append(process)
        return process

    def start_all(self, script: str, *arguments: object, **environ: str) -> list[RankProcess]:
        """Starts all ranks with the same script; returns the processes in rank order."""
        return [
            self.start(rank, script, *arguments, **environ) for rank in range(len(self.addresses))
        ]

    def end(self) -> list[str]:
        """Kills remaining ranks; returns their names and the remaining shared memory."""
        left = [process.task for process in self._started if process.end()]
        return left + [str(path) for path in self.directory.glob("hostopt-*")]


NewRing = Callable[[int], RankProcesses]
