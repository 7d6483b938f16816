"""Runs a program as the processes of one cluster, with their output and exit codes."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from fork_server import ForkedProcess, ForkServer
from harness import LOGS, PROGRAMS, QUIET, Process, deadline_s, reserved_addresses

from hostopt.launch.environment import tf_config_of


@dataclass
class Rank:
    """One started process.

    Args:
      name: its task, such as ``worker:1``.
    """

    name: str
    process: Process | ForkedProcess
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait(self, timeout_s: float = 100.0) -> int:
        return self.process.wait(timeout_s)

    def wait_for_output(self, text: str, timeout_s: float = 60.0) -> None:
        """Waits until `text` is in the output; fails if the process ends without it."""
        began_s = time.monotonic()
        while text not in self.output:
            assert self.process.poll() is None, f"{self.name} ended:\n{self.output}"
            waited_s = time.monotonic() - began_s
            assert waited_s < deadline_s(timeout_s), f"{self.name}: no {text!r}:\n{self.output}"
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@dataclass
class Ranks:
    """The processes of one cluster, whose output is in a directory."""

    directory: Path
    started: list[Rank] = field(default_factory=list)

    def start(
        self,
        program: str,
        jobs: dict[str, list[str]],
        *,
        task_arguments: dict[str, list[str]] | None = None,
        arguments: Sequence[str] = (),
        environ: dict[str, str] | None = None,
        evaluators: int = 0,
        tasks: Sequence[tuple[str, int]] = (),
        fresh: bool = False,
    ) -> list[Rank]:
        """Starts `program` for each task of `jobs`, and for evaluators that are not in `jobs`.

        Args:
          program: file below tests/programs, or an absolute path.
          task_arguments: additional arguments by task name.
          evaluators: number of evaluators that the cluster does not list.
          tasks: tasks to start; all by default.
          fresh: starts new interpreters instead of forks of a process that has imported
            TensorFlow; implied if `environ` has variables that imports may read.
        """
        all_tasks = [(job, i) for job, addresses in jobs.items() for i in range(len(addresses))]
        all_tasks += [("evaluator", i) for i in range(evaluators)]
        begin = len(self.started)
        for job, index in tasks or all_tasks:
            name = f"{job}:{index}"
            log = self.directory / f"{len(self.started)}-{job}-{index}.log"
            command = [str(PROGRAMS / program), *arguments, *(task_arguments or {}).get(name, [])]
            task = {**(environ or {}), "TF_CONFIG": tf_config_of(jobs, (job, index))}
            with log.open("wb") as output:
                process = _start(command, {**QUIET, **os.environ, **task}, output, fresh)
            LOGS.append((name, log))
            self.started.append(Rank(name, process, log))
        return self.started[begin:]

    def run(
        self,
        program: str,
        size: int,
        *,
        codes: Sequence[int] = (0,),
        limit_s: float = 100.0,
        **options: Any,
    ) -> list[Rank]:
        """Runs what `start` starts on workers, and waits until all of them have ended.

        Args:
          codes: exit code of each, or one that all of them must have.
        """
        with reserved_addresses(size) as addresses:
            ranks = self.start(program, {"worker": addresses}, **options)
            found = [rank.wait(limit_s) for rank in ranks]
        outputs = "\n".join(f"{rank.name}:\n{rank.output}" for rank in ranks)
        assert found == list(codes) * (1 if len(codes) > 1 else size), f"{found}\n{outputs}"
        return ranks

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Kills remaining processes; a test that passes leaves none."""
        left = [rank for rank in self.started if rank.process.poll() is None]
        for rank in left:
            rank.process.kill()
            rank.process.wait()


def caught(rank: Rank) -> list[dict[str, Any] | None]:
    """Returns the error of each training of a train.py with "catch"; None without an error."""
    parts = rank.output.split("CAUGHT ")[1:]  # other output may follow on the same line
    return [json.JSONDecoder().raw_decode(part)[0] for part in parts]


_fork_server: ForkServer | None = None


def _start(
    command: list[str], environ: dict[str, str], output: BinaryIO, fresh: bool
) -> Process | ForkedProcess:
    """Starts a Python program: a fork, unless its environment may change what imports do."""
    global _fork_server  # noqa: PLW0603
    if _fork_server is None:
        _fork_server = ForkServer({**QUIET, **os.environ})
        atexit.register(_fork_server.close)
    if fresh or _read_by_imports(environ) != _read_by_imports(_fork_server.environ):
        return Process(
            [sys.executable, *command], stdout=output, stderr=subprocess.STDOUT, env=environ
        )
    return _fork_server.start(command, environ, output)


def _read_by_imports(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that imports may read."""
    later = ("HOSTOPT_", "TF_CONFIG", "PYTEST_")
    return {name: value for name, value in environ.items() if not name.startswith(later)}
