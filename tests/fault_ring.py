"""Rings of processes that sum buckets under short deadlines, and what each says in the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conftest import ROOT, RankProcess, RankProcesses
from faults import FaultPlan
from ranks import PROGRAMS

TESTS = Path(__file__).resolve().parent
# The deadlines of tests: see SHORT for those that are options.
PING_S = 2.0
SHORT = {
    "HOSTOPT_RENDEZVOUS_TIMEOUT_S": "3",
    "HOSTOPT_STALL_WARNING_S": "1",
    "HOSTOPT_COLLECTIVE_TIMEOUT_S": "3",
    "HOSTOPT_SEGMENT_BYTES": "65536",
}


class FaultRing:
    """A ring whose ranks run tests/programs/ring_steps.py and meet at the same time.

    Args:
      processes: where its ranks are started.
      plan: the fault.
      environ: options of all ranks, beside those in SHORT.
    """

    def __init__(
        self, processes: RankProcesses, plan: FaultPlan | None = None, **environ: str
    ) -> None:
        self._processes = processes
        self._plan = plan
        self._environ = {**SHORT, "PYTHONPATH": f"{ROOT}:{TESTS}", "no_proxy": "*", **environ}

    def start(self, rank: int, *arguments: object, **options: Any) -> RankProcess:
        """Start a rank, which says "here" and waits for a line until it meets the others.

        Args:
          rank: which one.
          arguments: of the program.
          options: of `RankProcesses.start`.
        """
        plan = () if self._plan is None else ("--plan", self._plan.to_json())
        return self._processes.start(
            rank,
            (PROGRAMS / "ring_steps.py").read_text(),
            *("--ping-s", PING_S, "--memory-in", self._processes.directory, *plan, *arguments),
            **{**self._environ, **options},
        )

    def start_all(
        self, *arguments: object, own: dict[int, Sequence[object]] | None = None
    ) -> list[RankProcess]:
        """Start all ranks, and let them meet.

        Args:
          arguments: of all programs.
          own: more arguments by rank.
        """
        ranks = range(len(self._processes.addresses))
        started = [self.start(rank, *arguments, *(own or {}).get(rank, ())) for rank in ranks]
        let_meet(started)
        return started


def let_meet(started: Sequence[RankProcess]) -> None:
    """Let ranks go on from the start, all together."""
    for process in started:
        process.expect("here")
    for process in started:
        process.tell("meet")


def report(process: RankProcess) -> dict[str, Any]:
    """The last line that a rank prints."""
    line = process.line()
    assert line.startswith("{"), f"{process.task} printed {line!r}, and:\n{process.stderr}"
    return json.loads(line)


def assert_exact(process: RankProcess, steps: int = 6) -> None:
    """The rank ended well, and each of its sums was exact."""
    assert report(process) == {"steps": steps, "exact": True, "unread": 0}, process.stderr
    assert process.exit_code() == 0, process.stderr
