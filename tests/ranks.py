"""Runs a program as the real processes of one cluster, with what they say and how they end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent / "programs"


@contextmanager
def reserved_addresses(count: int) -> Iterator[list[str]]:
    """Loopback addresses that nobody else gets, and on which a gRPC server can listen."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for holder in sockets:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
        yield [f"127.0.0.1:{holder.getsockname()[1]}" for holder in sockets]
    finally:
        for holder in sockets:
            holder.close()


@dataclass
class Rank:
    """One started process.

    Args:
      name: its task, such as ``worker:1``.
      process: the process.
      log: file with its output.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait(self, timeout_s: float = 100.0) -> int:
        return self.process.wait(timeout_s)

    def wait_for_output(self, text: str, timeout_s: float = 60.0) -> None:
        """Return once `text` is in the output; fail where the process ends without it."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert self.process.poll() is None, f"{self.name} ended:\n{self.output}"
            assert time.monotonic() < deadline, f"{self.name} never said {text!r}:\n{self.output}"
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@dataclass
class Ranks:
    """The processes of one cluster.

    Args:
      directory: where their output goes.
    """

    directory: Path
    started: list[Rank] = field(default_factory=list)

    def start(
        self,
        program: str,
        jobs: dict[str, list[str]],
        *,
        own: dict[str, list[str]] | None = None,
        arguments: Sequence[str] = (),
        environ: dict[str, str] | None = None,
        evaluators: int = 0,
        tasks: Sequence[tuple[str, int]] = (),
    ) -> list[Rank]:
        """Start `program` once for each task of `jobs`, and for evaluators outside of it.

        Args:
          program: file below tests/programs, or an absolute path.
          jobs: addresses by job, as in TF_CONFIG.
          own: more arguments by task name.
          arguments: arguments of all.
          environ: more environment of all.
          evaluators: number of evaluators that the cluster does not list.
          tasks: those to start, where it is not all of them.
        """
        all_tasks = [(job, i) for job, addresses in jobs.items() for i in range(len(addresses))]
        all_tasks += [("evaluator", i) for i in range(evaluators)]
        begin = len(self.started)
        for job, index in tasks or all_tasks:
            name = f"{job}:{index}"
            config = {"cluster": jobs, "task": {"type": job, "index": index}}
            log = self.directory / f"{len(self.started)}-{job}-{index}.log"
            command = [sys.executable, str(PROGRAMS / program), *arguments]
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command + (own or {}).get(name, []),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={
                        **QUIET,
                        **os.environ,
                        **(environ or {}),
                        "TF_CONFIG": json.dumps(config),
                    },
                )
            self.started.append(Rank(name, process, log))
        return self.started[begin:]

    def run(self, program: str, size: int, **options: Any) -> list[Rank]:
        """Run `program` on `size` workers and wait until all of them have ended well."""
        with reserved_addresses(size) as addresses:
            ranks = self.start(program, {"worker": addresses}, **options)
            for rank in ranks:
                assert rank.wait() == 0, f"{rank.name}:\n{rank.output}"
        return ranks

    def end(self) -> None:
        """Kill what is left; a test that ends well leaves nothing."""
        left = [rank for rank in self.started if rank.process.poll() is None]
        for rank in left:
            rank.process.kill()
            rank.process.wait()


def caught(rank: Rank) -> list[dict[str, Any] | None]:
    """How the trainings of a train.py with "catch" have ended: the error, None without one."""
    parts = rank.output.split("CAUGHT ")[1:]  # what follows may be on the same line
    return [json.JSONDecoder().raw_decode(part)[0] for part in parts]


QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_NUM_INTRAOP_THREADS": "1", "PYTHONUNBUFFERED": "1"}
