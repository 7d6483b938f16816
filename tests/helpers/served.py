"""Trainings of the program `served_data.py`, and the elements that their ranks have seen."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import PROGRAMS, QUIET, Process
from launcher import Launcher

PROGRAM = str(PROGRAMS / "served_data.py")
RANKS = ("chief-0", "worker-0")


class Served:
    """Trainings in a directory, which is empty at first."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.launcher = Launcher(directory)

    def arguments(self, **settings: Any) -> str:
        return json.dumps({"directory": str(self.directory), **settings})

    def start(self, *arguments: str, environ: Any = None, **settings: Any) -> Process:
        command = (*arguments, "--verbose", "--", sys.executable, PROGRAM)
        chosen = self.arguments(**settings)
        return self.launcher.run(*command, chosen, **QUIET, **(environ or {}))

    def run(self, *arguments: str, code: int = 0, **settings: Any) -> str:
        """Returns the output of a training that ends with a code."""
        return self.output(self.start(*arguments, **settings), code)

    def output(self, process: Process, code: int = 0) -> str:
        """Returns the output of a training that has started, and ends with a code."""
        out, err = process.ended_with(code, 150)
        return str(out + err)

    def batches(self, task: str) -> list[list[int]]:
        """The batches of a task, without those that it makes up while others still have data.

        These repeat its last batch, or are zero if it has none.
        """
        lines = [
            json.loads(line)
            for path in sorted(self.directory.glob(f"{task}.*"))
            for line in path.read_text().splitlines()
        ]
        return [batch for batch, _ in itertools.groupby(lines) if batch != [0]]

    def elements(self, tasks: Sequence[str] = RANKS) -> list[int]:
        """The elements that some tasks have seen, in order."""
        return sorted(x for task in tasks for batch in self.batches(task) for x in batch)
