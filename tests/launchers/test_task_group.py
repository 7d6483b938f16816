"""Attempts of a group: restarts after failures and signals. Tasks fail according to a plan."""

from __future__ import annotations

import os
import re
import signal
import textwrap

import psutil
import pytest
from harness import is_gone, python, until
from launcher import NOTE, Launcher, lines_of

EARLY = "exited with code 0 before the other tasks"


def by_plan(plan: dict[int, list[int]], then: str = "") -> list[str]:
    """Returns the command of a program that exits according to a plan.

    Args:
      plan: exit codes of the attempts of each slot, -n for signal n; other attempts run `then`.
      then: Python code, with the variables `slot` and `attempt` (from 1); empty to succeed.
    """
    body = f"""
        import json
        config = json.loads(os.environ["TF_CONFIG"])
        if config["task"]["type"] != "evaluator":
            slot, size = int(os.environ["HOSTOPT_SLOT"]), sum(map(len, config["cluster"].values()))
            note(f"slot{{slot}}")
            attempt = len(list(pathlib.Path(os.environ["NOTES"]).glob(f"slot{{slot}}.*")))
            print(f"attempt {{attempt}} of slot {{slot}} with {{size}}")
            code = dict({list(plan.items())})
            code = (code.get(slot, []) + [None] * 99)[attempt - 1]
            if code is not None and code < 0:
                os.kill(os.getpid(), -code)
            if code is not None:
                sys.exit(code)
    """
    return python(NOTE + textwrap.dedent(body) + textwrap.dedent(then))


def attempts(launcher: Launcher, slot: int) -> int:
    return len(list(launcher.notes.glob(f"slot{slot}.*")))


# --- attempts ---------------------------------------------------------------------------------


def test_a_ring_is_restarted_until_it_succeeds(launcher: Launcher) -> None:
    command = by_plan({1: [200, -signal.SIGKILL, 76]})
    out, err = launcher.ended("-np", "2", "--max-restarts", "9", *command)
    assert lines_of(out, "chief:0") == [f"attempt {i} of slot 0 with 2" for i in (1, 2, 3, 4)]
    assert lines_of(out, "worker:0") == [f"attempt {i} of slot 1 with 2" for i in (1, 2, 3, 4)]
    assert re.findall(r"root cause: (.*); restarting in ([\d.]+) s", err) == [
        (f"chief:0 {EARLY} (worker:0: exit code 200 (PeerLostError))", "0.01"),
        ("worker:0: exit code 137 (SIGKILL)", "0.02"),
        ("worker:0: exit code 76 (ProtocolError)", "0.04"),
    ]


def test_each_attempt_has_new_ports(launcher: Launcher) -> None:
    then = "print(config['cluster']); sys.exit(200 if attempt == 1 else 0)"
    out, _ = launcher.ended("-np", "1", "--max-restarts", "1", *by_plan({}, then))
    first, second = (line for line in lines_of(out, "chief:0") if "chief" in line)
    assert first != second


def test_the_last_attempt_determines_the_root_cause(launcher: Launcher) -> None:
    command = by_plan({0: [200] * 9, 1: [-signal.SIGKILL] * 9, 2: [200] * 9})
    _, err = launcher.ended("-np", "3", "--max-restarts", "2", *command, code=128 + signal.SIGKILL)
    last = (
        "attempt 3 of 3 failed; root cause: worker:0: exit code 137 (SIGKILL); no restart is left"
    )
    assert f"hostopt: {last}" in err.splitlines()
    assert [attempts(launcher, slot) for slot in range(3)] == [3, 3, 3]


def test_a_permanent_failure_is_final_even_if_seen_second(launcher: Launcher) -> None:
    then = """
        notes = pathlib.Path(os.environ["NOTES"])
        if slot == 0:  # its supervisor is gone once the launcher has seen its exit
            note(f"supervisor-{os.getppid()}")
            sys.exit(200)
        while not list(notes.glob("supervisor-*")): time.sleep(0.01)
        supervisor, = notes.glob("supervisor-*")
        while os.path.exists("/proc/" + supervisor.stem.partition("-")[2]): time.sleep(0.01)
        sys.exit(65)
    """
    _, err = launcher.ended("-np", "2", "--max-restarts", "5", *by_plan({}, then), code=65)
    assert "chief:0 failed first: exit code 200" in err
    assert "worker:0: exit code 65 (CollectiveMismatchError); a restart would fail" in err
    assert attempts(launcher, 0) == 1


def test_a_frozen_rank_is_named_and_the_ring_restarted(launcher: Launcher) -> None:
    then = """
        if (slot, attempt) == (0, 1):
            while not list(pathlib.Path(os.environ["NOTES"]).glob("slot1.*")): time.sleep(0.01)
            sys.exit(200)
    """
    command = by_plan({1: [-signal.SIGSTOP]}, then)
    _, err = launcher.ended("-np", "2", "--max-restarts", "1", *command, grace_s=0.1, kill_s=0.2)
    assert "root cause: worker:0 did not exit in time" in err


def test_a_slot_that_fails_repeatedly_is_left_out_and_rejoins(
    launcher: Launcher,
) -> None:
    killed = -signal.SIGKILL
    command = by_plan({1: [killed, killed], 2: [0, 0, 200]})
    out, err = launcher.ended("-np", "3", "--max-restarts", "5", "--min-np", "2", *command)
    assert lines_of(out, "worker:0") == [
        "attempt 1 of slot 1 with 3",
        "attempt 2 of slot 1 with 3",
        "attempt 3 of slot 2 with 2",
        "attempt 3 of slot 1 with 3",
    ]
    assert lines_of(out, "chief:0") == [
        f"attempt {i} of slot 0 with {size}" for i, size in enumerate((3, 3, 2, 3), 1)
    ]
    assert "restarting in 0.02 s, without slot 1" in err
    left = f"chief:0 {EARLY} (worker:0 (slot 2): exit code 200 (PeerLostError))"
    assert f"root cause: {left}" in err


def test_the_first_slot_in_use_is_the_chief(launcher: Launcher) -> None:
    command = by_plan({0: [-signal.SIGSEGV, -signal.SIGSEGV]})
    out, _ = launcher.ended("-np", "2", "--max-restarts", "5", "--min-np", "1", *command)
    assert lines_of(out, "chief:0")[-1] == "attempt 3 of slot 1 with 1"


def test_the_ring_keeps_its_size_without_min_np(launcher: Launcher) -> None:
    out, _ = launcher.ended(
        "-np", "2", "--max-restarts", "3", *by_plan({1: [200 - 5] * 9}), code=195
    )
    assert len(lines_of(out, "worker:0")) == 4


def test_restore_previous_reaches_the_ranks(launcher: Launcher) -> None:
    code = "import os; print(os.environ.get('HOSTOPT_RESTORE_PREVIOUS'))"
    for arguments, value in (([], "None"), (["--restore-previous"], "true")):
        process = launcher.run("-np", "1", *arguments, *python(code))
        out, _ = process.communicate(timeout=30)
        assert lines_of(out, "chief:0") == [value]


# --- evaluators -------------------------------------------------------------------------------


def test_an_evaluator_keeps_running_while_the_ring_restarts(launcher: Launcher) -> None:
    then = """
        if config["task"]["type"] == "evaluator":
            note("evaluator")
            while len(list(pathlib.Path(os.environ["NOTES"]).glob("slot0.*"))) < 3:
                time.sleep(0.01)
            print("has seen both restarts")
        else:
            while not list(pathlib.Path(os.environ["NOTES"]).glob("evaluator.*")):
                time.sleep(0.01)
            if attempt < 3:
                sys.exit(200)
    """
    out, _ = launcher.ended(
        "-np", "1", "--evaluators", "1", "--max-restarts", "2", *by_plan({}, then), grace_s=0.0
    )
    assert lines_of(out, "evaluator:0") == ["has seen both restarts"]
    assert len(launcher.pids("evaluator", 1)) == 1


def test_a_killed_evaluator_restarts_at_its_address(launcher: Launcher) -> None:
    then = """
        evaluators = lambda: len(list(pathlib.Path(os.environ["NOTES"]).glob("evaluator.*")))
        if config["task"]["type"] == "evaluator":
            note("evaluator")
            print(config["cluster"]["evaluator"])
            if evaluators() < 3:
                os.kill(os.getpid(), 9)
        else:
            while evaluators() < 3: time.sleep(0.01)
    """
    out, err = launcher.ended(
        "-np", "1", "--evaluators", "1", "--max-restarts", "2", *by_plan({}, then)
    )
    assert len(lines_of(out, "evaluator:0")) == 3
    assert len(set(lines_of(out, "evaluator:0"))) == 1
    assert len(lines_of(out, "chief:0")) == 1  # training continued
    assert "evaluator:0 failed: exit code 137 (SIGKILL); restarting it in" in err


def test_an_evaluator_ends_when_the_ring_gives_up(launcher: Launcher) -> None:
    then = """
        if config["task"]["type"] == "evaluator":
            note("evaluator")
            time.sleep(600)
        while not list(pathlib.Path(os.environ["NOTES"]).glob("evaluator.*")): time.sleep(0.01)
        sys.exit(201)
    """
    launcher.ended(
        "-np",
        "1",
        "--evaluators",
        "1",
        "--max-restarts",
        "1",
        *by_plan({}, then),
        grace_s=0.0,
        code=201,
    )
    assert len(launcher.pids("evaluator", 1)) == 1


# --- signals ----------------------------------------------------------------------------------


# A rank that handles a signal like a training: it saves, which takes a while, and exits.
SAVES = """
    def save(signum, frame):
        time.sleep(1.0)
        note("saved")
        sys.exit(128 + signum)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, save)
    note("ready")
    while True: time.sleep(1)
"""


@pytest.mark.parametrize(
    ("signum", "preemption_s"),
    [(signal.SIGINT, 0.1), (signal.SIGTERM, 30.0)],  # SIGINT has no deadline
    ids=["SIGINT", "SIGTERM"],
)
def test_after_a_signal_ranks_have_time_to_save_and_are_not_restarted(
    launcher: Launcher, signum: signal.Signals, preemption_s: float
) -> None:
    command = ("-np", "2", "--max-restarts", "3", *by_plan({}, SAVES))
    process = launcher.run(*command, grace_s=0.0, kill_s=0.0, preemption_s=preemption_s)
    launcher.pids("ready", 2)
    process.send_signal(signum)
    _, err = process.ended_with(128 + signum)
    assert len(launcher.pids("saved", 2)) == 2
    assert [attempts(launcher, slot) for slot in (0, 1)] == [1, 1]
    assert "sending" not in err


def test_a_task_that_does_not_end_after_a_signal_is_killed(launcher: Launcher) -> None:
    then = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note("ready")
        while True: time.sleep(1)
    """
    process = launcher.run("-np", "2", "--max-restarts", "3", *by_plan({}, then), preemption_s=0.5)
    launcher.pids("ready", 2)
    process.send_signal(signal.SIGTERM)
    _, err = process.ended_with(143)
    assert "sending SIGKILL to chief:0, worker:0" in err


def test_a_checkpoint_that_cannot_be_saved_after_a_signal_is_an_error(launcher: Launcher) -> None:
    then = SAVES.replace("sys.exit(128 + signum)", "sys.exit(74 if slot == 0 else 200)")
    process = launcher.run("-np", "2", "--max-restarts", "3", *by_plan({}, then))
    launcher.pids("ready", 2)
    process.send_signal(signal.SIGTERM)
    _, err = process.ended_with(74)
    assert "root cause: chief:0: exit code 74 (CheckpointError)" in err


def test_a_preempted_rank_leaves_the_others_time_to_save_and_all_restart(
    launcher: Launcher,
) -> None:
    """One rank receives SIGTERM, and makes the others save and exit."""
    then = """
        if attempt == 1 and slot == 0:
            while not list(pathlib.Path(os.environ["NOTES"]).glob("slot1.*")): time.sleep(0.01)
            sys.exit(143)
        if attempt == 1:
            time.sleep(1.0)
            note("saved")
            sys.exit(143)
    """
    launcher.ended("-np", "2", "--max-restarts", "3", *by_plan({}, then), grace_s=0.0, kill_s=0.0)
    assert len(launcher.pids("saved", 1)) == 1
    assert [attempts(launcher, slot) for slot in (0, 1)] == [2, 2]


def test_a_signal_ends_the_wait_for_the_next_attempt(launcher: Launcher) -> None:
    command = by_plan({0: [200]}, "note('evaluator'); time.sleep(600)")
    process = launcher.run(
        "-np", "1", "--evaluators", "1", "--max-restarts", "3", *command, delay_s=600.0
    )
    launcher.pids("evaluator", 1)
    assert process.stderr is not None
    until(lambda: "restarting in 600 s" in process.stderr.readline(), "back-off")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    assert attempts(launcher, 0) == 1


def test_no_orphan_when_the_launcher_is_killed_in_a_later_attempt(launcher: Launcher) -> None:
    command = by_plan({0: [200], 1: [200]}, "note('ready'); time.sleep(600)")
    process = launcher.run("-np", "2", "--max-restarts", "3", *command)
    ready = launcher.pids("ready", 2)
    family = psutil.Process(process.pid).children(recursive=True)
    assert set(ready) < {member.pid for member in family}
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: all(is_gone(member.pid) for member in family), "end of all descendants")


def test_no_restart_by_default(launcher: Launcher) -> None:
    process = launcher.run("-np", "1", *by_plan({0: [200]}))
    assert process.wait(20) == 200
    assert attempts(launcher, 0) == 1
