"""Rings of processes that sum buckets under short deadlines, and their reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faults import FaultPlan
from harness import PROGRAMS, ROOT
from rings import RankProcess, RankProcesses

HELPERS = Path(__file__).resolve().parent
# Deadlines of tests; SHORT has those that are options.
PING_S = 2.0
SHORT = {
    "HOSTOPT_RENDEZVOUS_TIMEOUT_S": "3",
    "HOSTOPT_STALL_WARNING_S": "1",
    "HOSTOPT_COLLECTIVE_TIMEOUT_S": "3",
    "HOSTOPT_SEGMENT_BYTES": "65536",
}

# Time for the end of a process after the deadline of a fault, on a busy machine.
END_S = 4.0
VICTIM = 1


class FaultRing:
    """A ring whose ranks run tests/programs/ring_steps.py and connect at the same time."""

    def __init__(
        self, processes: RankProcesses, plan: FaultPlan | None = None, **environ: str
    ) -> None:
        self._processes = processes
        self._plan = plan
        self._environ = {**SHORT, "PYTHONPATH": f"{ROOT}:{HELPERS}", "no_proxy": "*", **environ}

    def start(self, rank: int, *arguments: object, **options: Any) -> RankProcess:
        """Starts a rank, which prints "ready" and waits for a line before it connects."""
        plan = () if self._plan is None else ("--plan", self._plan.to_json())
        return self._processes.start(
            rank,
            (PROGRAMS / "ring_steps.py").read_text(),
            *("--ping-s", PING_S, "--memory-in", self._processes.directory, *plan, *arguments),
            **{**self._environ, **options},
        )

    def start_all(
        self, *arguments: object, rank_arguments: dict[int, Sequence[object]] | None = None
    ) -> list[RankProcess]:
        """Starts all ranks and lets them connect; some may have arguments of their own."""
        ranks = range(len(self._processes.addresses))
        started = [
            self.start(rank, *arguments, *(rank_arguments or {}).get(rank, ())) for rank in ranks
        ]
        connect_all(started)
        return started


def connect_all(started: Sequence[RankProcess]) -> None:
    """Lets started ranks connect at the same time."""
    for process in started:
        process.expect("ready")
    for process in started:
        process.write_line("connect")


def report(process: RankProcess) -> dict[str, Any]:
    """Parses the last line that a rank prints."""
    line = process.line()
    assert line.startswith("{"), f"{process.task} printed {line!r}, and:\n{process.stderr}"
    return json.loads(line)


def assert_exact(process: RankProcess, steps: int = 6) -> None:
    """Checks that the rank succeeded and that each of its sums was exact."""
    assert report(process) == {"steps": steps, "exact": True, "unread": 0}, process.stderr
    assert process.exit_code() == 0, process.stderr


def others(started: Sequence[RankProcess]) -> list[RankProcess]:
    return [process for rank, process in enumerate(started) if rank != VICTIM]


def end(process: RankProcess) -> None:
    """Kills a rank that would not end soon by itself."""
    process.kill()
    assert process.exit_code() == -9


def assert_all_blame(
    ring: RankProcesses,
    survivors: Sequence[RankProcess],
    kind: str,
    within_s: float,
    blamed: int = VICTIM,
) -> list[dict[str, Any]]:
    """Checks that all survivors end with this error, which names one rank and one cause.

    They may take `within_s` from now on. Returns what each reports.
    """
    code = {"ProtocolError": 76, "PeerLostError": 200, "CollectiveTimeoutError": 201}[kind]
    assert {process.exit_code(within_s + END_S) for process in survivors} == {code}
    reports = [report(process) for process in survivors]
    for result in reports:
        assert result["exact"] and result["only_sums"], result
        error = result["error"]
        assert error["kind"] == kind, error
        assert error["facts"]["rank"] == blamed, error
        assert ring.name(blamed) in error["message"]
    assert len({result["error"]["facts"]["root_cause"] for result in reports}) == 1, reports
    return reports
