"""`hostopt run` in a process of its own, for tests; what it runs writes notes into a directory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]

# What a child does to note that it is `name`.
NOTE = """
import os, pathlib, signal, sys, time
def note(name):
    pathlib.Path(os.environ["NOTES"], f"{name}.{os.getpid()}").touch()
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


def until(condition: Callable[[], object], what: str, deadline_s: float = 15.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {deadline_s} s"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def lines_of(text: str, task: str) -> list[str]:
    prefix = f"[{task}] "
    return [line[len(prefix) :] for line in text.splitlines() if line.startswith(prefix)]


class Launcher:
    """`hostopt run` in a process of its own, with short times; its tasks write to `notes`."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes
        self.started: list[subprocess.Popen[str]] = []

    def run(
        self,
        *arguments: str,
        grace_s: float = 30.0,
        kill_s: float = 30.0,
        delay_s: float = 0.01,
        preemption_s: float = 30.0,
        patience_s: float = 10.0,
        **environ: str,
    ) -> subprocess.Popen[str]:
        """Start it.

        Args:
          arguments: of `hostopt run`.
          grace_s: seconds from a rank's failure to SIGTERM.
          kill_s: from SIGTERM to SIGKILL.
          delay_s: before the second attempt.
          preemption_s: from a signal to SIGKILL.
          patience_s: with whoever does not read the output.
          environ: more variables of its environment.

        Returns:
          The launcher's process.
        """
        code = f"""
            import functools, sys
            from hostopt import cli, launch, output, restarts, task_group
            output.PATIENCE_S = {patience_s}
            task_group.KILL_S = {kill_s}
            task_group.PREEMPTION_S = {preemption_s}
            restarts.FIRST_DELAY_S = {delay_s}
            cli.launch = functools.partial(launch.launch, grace_s={grace_s})
            sys.exit(cli.main(sys.argv[1:]))
        """
        process = subprocess.Popen(
            [*python(code), "run", *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), "NOTES": str(self.notes), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def pids(self, name: str, count: int) -> list[int]:
        """Wait until `count` processes have noted that they are `name`, and return their pids."""
        found: list[int] = []

        def noted() -> bool:
            found[:] = [int(path.suffix[1:]) for path in self.notes.glob(f"{name}.*")]
            return len(found) >= count

        until(noted, f"{count} notes of {name!r}")
        return found
