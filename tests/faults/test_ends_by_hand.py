"""Every way in which a rank or an evaluator that was started by hand can end."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fault_ring import FaultRing, report
from faults import FaultPlan
from harness import reserved_addresses, until
from ranks import Rank, Ranks
from rings import NewRing, RankProcess, RankProcesses

VICTIM = 1
# Exit code for each way to end a rank; None if it does not exit by itself.
ENDS: dict[str, int | None] = {
    "kill": -9,
    "stop": None,
    "exit": 0,
    "os-exit": 0,
    "exit-3": 3,
    "raise": 1,
    "disconnect": None,
}
every_end = pytest.mark.parametrize("action", ENDS)


def ring_with(ring: RankProcesses, point: str, action: str, step: int = 0) -> FaultRing:
    # longer than this test waits: pings detect a frozen rank
    deadlines = {"HOSTOPT_RENDEZVOUS_TIMEOUT_S": "2", "HOSTOPT_COLLECTIVE_TIMEOUT_S": "100"}
    return FaultRing(ring, FaultPlan(VICTIM, step, point, action), **deadlines)


def is_stopped(process: RankProcess | Rank) -> bool:
    pid = process.process.pid
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def assert_ended(victim: RankProcess, action: str, alive: int) -> None:
    """Checks the exit code of the victim, which is `alive` if the action did not end it."""
    if action == "stop":
        until(lambda: is_stopped(victim), "stop")
        victim.process.send_signal(signal.SIGCONT)
    code = ENDS[action]
    assert victim.exit_code() == (alive if code is None else code), victim.stderr


@every_end
def test_a_rank_ends_before_the_rendezvous(processes: NewRing, action: str) -> None:
    ring = processes(2)
    with reserved_addresses(2) as elsewhere:
        jobs = {"chief": elsewhere[:1], "worker": elsewhere[1:]}
        faults = ring_with(ring, "before-rendezvous", action)
        own = {"jobs": jobs} if action == "disconnect" else {}
        started = [faults.start(0), faults.start(VICTIM, **own)]
        for process in started:
            process.expect("ready")
            process.write_line("connect")
        survivor, victim = started
        assert survivor.exit_code() == 202, survivor.stderr
        error = report(survivor)["error"]
        assert f"missing: worker:0 ({ring.addresses[VICTIM]})" in error["message"]
        assert_ended(victim, action, alive=202)


@every_end
def test_a_rank_ends_in_training(processes: NewRing, action: str) -> None:
    ring = processes(2)
    survivor, victim = ring_with(ring, "between-steps", action, step=3).start_all()
    assert survivor.exit_code() == 200, survivor.stderr
    result = report(survivor)
    assert result["exact"], result
    assert result["steps"] in (2, 3), result  # the last message of a killed rank may be lost
    assert result["error"]["facts"]["rank"] == VICTIM, result
    assert_ended(victim, action, alive=200)


@every_end
def test_a_rank_ends_after_training(processes: NewRing, action: str) -> None:
    ring = processes(2)
    survivor, victim = ring_with(ring, "after-training", action).start_all("--ask-at-end")
    for process in (survivor, victim):
        process.expect("done")
    victim.write_line("end")
    if action == "stop":
        until(lambda: is_stopped(victim), "stop")
    elif action != "disconnect":
        assert victim.exit_code() == ENDS[action], victim.stderr
    survivor.write_line("end")
    assert survivor.exit_code() == 0, survivor.stderr
    assert "error" not in report(survivor)
    assert_ended(victim, action, alive=0)


# -- with TensorFlow: a chief and evaluators -----------------------------------------------


@pytest.fixture
def start(tmp_path: Path, ranks: Ranks) -> Iterator[Callable[..., Rank]]:
    """Starts a chief or an evaluator: `start(task, **settings)`."""
    with reserved_addresses(1) as addresses:

        def start_one(task: str, **settings: Any) -> Rank:
            small = {"images": 300, "metric": "accuracy", "model_dir": str(tmp_path / "model")}
            (process,) = ranks.start(
                "evaluate.py",
                {"chief": addresses},
                tasks=[(task, 0)],
                arguments=[json.dumps({**small, **settings})],
                environ={"HOSTOPT_EVALUATOR_TIMEOUT_S": "4", "HOSTOPT_STALL_WARNING_S": "1"},
            )
            return process

        yield start_one
    left = [rank.name for rank in ranks.started if rank.process.poll() is None]
    assert not left, f"still running at the end of the test: {', '.join(left)}"


def start_stopped(start: Callable[..., Rank], then: str = "") -> Rank:
    """Starts a chief and stops it in training, so that its lock and a checkpoint exist."""
    chief = start("chief", end=f"SIGSTOP {then}")
    chief.wait_for_output("ends\n")
    until(lambda: is_stopped(chief), "stop")
    return chief


@pytest.mark.parametrize(
    ("end", "code", "kind"),
    [
        ("before", 202, "RendezvousTimeoutError"),
        ("exit0", 200, "PeerLostError"),
        ("kill", 200, "PeerLostError"),
    ],
)
def test_an_evaluator_ends_after_its_chief_has_vanished(
    start: Callable[..., Rank], end: str, code: int, kind: str
) -> None:
    if end == "before":
        chief, evaluator = start("chief", end="exit0", end_before=True), start("evaluator")
    else:
        chief, evaluator = start_stopped(start, then="exit0"), start("evaluator")
        evaluator.wait_for_output("Saving dict for global step 0")
        chief.signal(signal.SIGKILL if end == "kill" else signal.SIGCONT)
    assert chief.wait() == (-9 if end == "kill" else 0), chief.output
    assert evaluator.wait() == code, evaluator.output
    assert f"{kind}: this evaluator has seen nothing of the chief for 4 s: nobody trains in" in (
        evaluator.output
    )
    assert "this evaluator has seen nothing of the chief for 1 s: nobody" in evaluator.output
    assert "raise evaluator_timeout_s (4)" in evaluator.output


def test_evaluators_that_end_do_not_disturb_the_training(start: Callable[..., Rank]) -> None:
    chief = start_stopped(start)
    failed, frozen = start("evaluator", end="exit3"), start("evaluator", end="SIGSTOP")
    assert failed.wait() == 3, failed.output
    frozen.wait_for_output("ends\n")
    until(lambda: is_stopped(frozen), "stop")
    chief.signal(signal.SIGCONT)
    assert chief.wait() == 0, chief.output
    frozen.signal(signal.SIGCONT)
    assert frozen.wait() == 0, frozen.output
