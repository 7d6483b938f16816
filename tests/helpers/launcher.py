"""Runs `hostopt run` in a new process. Its tasks leave notes: files in a directory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from harness import ROOT, Process, python, until

from hostopt.launch import launcher, task_group

# Code of tasks: creates a file with a name and the pid of the task.
NOTE = """
import os, pathlib, signal, sys, time
def note(name):
    pathlib.Path(os.environ["NOTES"], f"{name}.{os.getpid()}").touch()
"""


def launched(
    command: Sequence[str],
    engine: Any = None,
    grace_s: float = task_group.GRACE_S,
    **options: Any,
) -> int:
    """Runs a command in this process, and returns its exit code."""
    with mock.patch.object(task_group, "GRACE_S", grace_s):
        return launcher.launch(command, launcher.RunOptions(**options), engine)


def lines_of(text: str, task: str) -> list[str]:
    prefix = f"[{task}] "
    return [line[len(prefix) :] for line in text.splitlines() if line.startswith(prefix)]


class Launcher:
    """Starts `hostopt run` with short times; its tasks write to the directory `notes`."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes
        self.started: list[Process] = []

    def run(
        self,
        *arguments: str,
        grace_s: float = 30.0,
        kill_s: float = 30.0,
        delay_s: float = 0.01,
        preemption_s: float = 30.0,
        reader_timeout_s: float = 10.0,
        **environ: str,
    ) -> Process:
        """Starts `hostopt run`.

        Args:
          grace_s: seconds from a rank's failure to SIGTERM.
          kill_s: seconds from SIGTERM to SIGKILL.
          delay_s: seconds before the second attempt.
          preemption_s: seconds from a signal to SIGKILL.
          reader_timeout_s: seconds without a read before lines of output are dropped.
        """
        code = f"""
            import sys
            from hostopt import __main__ as cli
            from hostopt.launch import output, restarts, task_group
            output.READER_TIMEOUT_S = {reader_timeout_s}
            task_group.GRACE_S = {grace_s}
            task_group.KILL_S = {kill_s}
            task_group.PREEMPTION_S = {preemption_s}
            restarts.FIRST_DELAY_S = {delay_s}
            sys.exit(cli.main(sys.argv[1:]))
        """
        process = Process(
            [*python(code), "run", *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), "NOTES": str(self.notes), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def ended(
        self, *arguments: str, code: int = 0, limit_s: float = 30.0, **options: Any
    ) -> tuple[str, str]:
        """Runs a launcher, which must end with that code; returns its output and errors."""
        return self.run(*arguments, **options).ended_with(code, limit_s)

    def pids(self, name: str, count: int) -> list[int]:
        """Waits until `count` processes have noted `name`, and returns their pids."""
        result: list[int] = []

        def noted() -> bool:
            result[:] = [int(path.suffix[1:]) for path in self.notes.glob(f"{name}.*")]
            return len(result) >= count

        until(noted, f"{count} notes of {name!r}")
        return result
