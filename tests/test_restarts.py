"""What the launcher does once a rank has failed; programs fail by a plan, without TensorFlow."""

from __future__ import annotations

import os
import re
import signal
import textwrap

import psutil
import pytest
from launcher import NOTE, Launcher, is_gone, lines_of, python, until

from hostopt import restarts
from hostopt.restarts import Ending, Restarts, Slots, judge

pytestmark = pytest.mark.timeout(60)


EARLY = "ended with exit code 0 before the others had done"


def by_plan(plan: dict[int, list[int]], then: str = "") -> list[str]:
    """A program that ends as the plan says.

    Args:
      plan: exit codes of the lives of each slot, -n for signal n; other lives run `then`.
      then: Python, which knows the `slot` and the `life`, from 1; without it the life succeeds.

    Returns:
      The command.
    """
    body = f"""
        import json
        config = json.loads(os.environ["TF_CONFIG"])
        if config["task"]["type"] != "evaluator":
            slot, size = int(os.environ["HOSTOPT_SLOT"]), sum(map(len, config["cluster"].values()))
            note(f"slot{{slot}}")
            life = len(list(pathlib.Path(os.environ["NOTES"]).glob(f"slot{{slot}}.*")))
            print(f"life {{life}} of slot {{slot}} with {{size}}")
            code = dict({list(plan.items())})
            code = (code.get(slot, []) + [None] * 99)[life - 1]
            if code is not None and code < 0:
                os.kill(os.getpid(), -code)
            if code is not None:
                sys.exit(code)
    """
    return python(NOTE + textwrap.dedent(body) + textwrap.dedent(then))


def lives(launcher: Launcher, slot: int) -> int:
    return len(list(launcher.notes.glob(f"slot{slot}.*")))


# --- the judgement ----------------------------------------------------------------------------


def endings(*codes: int, forced: tuple[int, ...] = ()) -> list[Ending]:
    """The ranks' ends, in the order in which they are seen."""
    return [Ending(f"rank{i}", i, code, i in forced) for i, code in enumerate(codes)]


@pytest.mark.parametrize("code", [1, 2, 65, 70, 74, 77, 78, 79])
def test_codes_that_are_permanent_are_not_tried_again(code: int) -> None:
    for seen in (endings(200, code, 137), endings(code, 200)):
        verdict = judge(seen)
        assert (verdict.code, verdict.retry) == (code, False)


@pytest.mark.parametrize("code", [76, 130, 134, 137, 139, 143, 193, 200, 201, 202, 203, 255])
def test_codes_that_are_worth_another_attempt(code: int) -> None:
    verdict = judge(endings(0, code))
    assert (verdict.code, verdict.retry) == (code, True)


def test_success_needs_no_other_attempt() -> None:
    verdict = judge(endings(0, 0))
    assert (verdict.code, verdict.retry) == (0, False)


def test_who_was_killed_is_the_root_cause_and_not_who_saw_it_first() -> None:
    verdict = judge(endings(200, 200, 137))
    assert (verdict.code, verdict.culprits) == (137, {2})
    assert verdict.reason == "rank2: exit code 137 (SIGKILL)"


def test_who_failed_by_itself_is_the_root_cause_and_not_who_reports_it() -> None:
    verdict = judge(endings(200, 195, 200))
    assert (verdict.code, verdict.culprits) == (195, {1})


def test_who_did_not_end_by_itself_is_what_the_others_report() -> None:
    verdict = judge(endings(200, 143, 200, forced=(1,)))
    assert (verdict.code, verdict.culprits) == (200, {1})
    assert verdict.reason == (
        "rank1 did not end when others did (rank0: exit code 200 (PeerLostError))"
    )


def test_where_all_report_only_nobody_is_to_blame() -> None:
    verdict = judge(endings(76, 76))
    assert (verdict.code, verdict.retry, verdict.culprits) == (76, True, frozenset())
    assert verdict.reason == "rank0: exit code 76 (ProtocolError)"


def test_who_has_no_descriptor_left_has_failed_by_itself() -> None:
    verdict = judge(endings(0, 200, 203))
    assert (verdict.code, verdict.retry, verdict.culprits) == (203, True, {2})


@pytest.mark.parametrize("code", [200, 201, 202])
def test_who_ended_with_0_while_others_needed_it_is_the_root_cause(code: int) -> None:
    verdict = judge(endings(0, code, code))
    assert (verdict.code, verdict.retry, verdict.culprits) == (code, True, frozenset())
    assert verdict.reason.startswith(f"rank0 {EARLY} (rank1: exit code {code} (")


def test_what_the_launcher_itself_ended_has_not_failed() -> None:
    assert judge(endings(1, 200, forced=(0,))).code == 200


def test_delays_double_up_to_a_minute_and_begin_anew_after_a_long_attempt() -> None:
    again = Restarts(12)
    assert [again.next_delay_s(1.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [again.next_delay_s(lasted_s) for lasted_s in (60.1, 1.0, 61.0)] == [1, 2, 1]
    assert again.next_delay_s(1.0) == 2
    assert again.next_delay_s(1.0) is None


def test_a_slot_is_left_out_after_two_failures_in_a_row_and_tried_again() -> None:
    slots = Slots(4, 2)
    used = []
    for culprits in [{1}, {1}, {3}, {1}, {0}, set()]:
        slots.choose(culprits)
        used.append(slots.in_use)
    assert used == [
        [0, 1, 2, 3],
        [0, 2, 3],
        [0, 1, 2, 3],
        [0, 2, 3],  # its third failure in a row
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]


def test_failures_that_are_not_in_a_row_leave_no_slot_out() -> None:
    slots = Slots(3, 1)
    for culprits in [{1}, {2}, {1}, set(), {1}]:
        slots.choose(culprits)
        assert slots.in_use == [0, 1, 2]


def test_no_more_slots_are_left_out_than_allowed() -> None:
    slots = Slots(3, 2)
    for _ in range(2):
        slots.choose({0, 1})
    assert slots.in_use == [1, 2]


def test_where_all_have_failed_none_is_to_blame() -> None:
    slots = Slots(2, 1)
    for _ in range(3):
        slots.choose({0, 1})
    assert slots.in_use == [0, 1]


# --- attempts ---------------------------------------------------------------------------------


def test_a_ring_is_started_again_until_it_succeeds(launcher: Launcher) -> None:
    command = by_plan({1: [200, -signal.SIGKILL, 76]})
    process = launcher.run("-np", "2", "--max-restarts", "9", *command)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert lines_of(out, "chief:0") == [f"life {life} of slot 0 with 2" for life in (1, 2, 3, 4)]
    assert lines_of(out, "worker:0") == [f"life {life} of slot 1 with 2" for life in (1, 2, 3, 4)]
    assert re.findall(r"root cause: (.*); the next begins in ([\d.]+) s", err) == [
        (f"chief:0 {EARLY} (worker:0: exit code 200 (PeerLostError))", "0.01"),
        ("worker:0: exit code 137 (SIGKILL)", "0.02"),
        ("worker:0: exit code 76 (ProtocolError)", "0.04"),
    ]


def test_each_attempt_has_ports_of_its_own(launcher: Launcher) -> None:
    then = "print(config['cluster']); sys.exit(200 if life == 1 else 0)"
    process = launcher.run("-np", "1", "--max-restarts", "1", *by_plan({}, then))
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    first, second = (line for line in lines_of(out, "chief:0") if "chief" in line)
    assert first != second


def test_the_last_attempt_gives_the_root_cause(launcher: Launcher) -> None:
    command = by_plan({0: [200] * 9, 1: [-signal.SIGKILL] * 9, 2: [200] * 9})
    process = launcher.run("-np", "3", "--max-restarts", "2", *command)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL
    last = "attempt 3 of 3 failed; root cause: worker:0: exit code 137 (SIGKILL); giving up"
    assert f"hostopt: {last}" in err.splitlines()
    assert [lives(launcher, slot) for slot in range(3)] == [3, 3, 3]


def test_a_permanent_failure_is_final_though_another_was_seen_first(launcher: Launcher) -> None:
    then = """
        notes = pathlib.Path(os.environ["NOTES"])
        if slot == 0:  # its supervisor is gone once the launcher has seen its end
            note(f"supervisor-{os.getppid()}")
            sys.exit(200)
        while not list(notes.glob("supervisor-*")): time.sleep(0.01)
        supervisor, = notes.glob("supervisor-*")
        while os.path.exists("/proc/" + supervisor.stem.partition("-")[2]): time.sleep(0.01)
        sys.exit(65)
    """
    process = launcher.run("-np", "2", "--max-restarts", "5", *by_plan({}, then))
    _, err = process.communicate(timeout=30)
    assert process.returncode == 65, err
    assert "chief:0 failed first: exit code 200" in err
    assert "worker:0: exit code 65 (CollectiveMismatchError); another attempt would not" in err
    assert lives(launcher, 0) == 1


def test_a_frozen_rank_is_named_and_the_ring_started_again(launcher: Launcher) -> None:
    then = """
        if (slot, life) == (0, 1):
            while not list(pathlib.Path(os.environ["NOTES"]).glob("slot1.*")): time.sleep(0.01)
            sys.exit(200)
    """
    command = by_plan({1: [-signal.SIGSTOP]}, then)
    process = launcher.run("-np", "2", "--max-restarts", "1", *command, grace_s=0.1, kill_s=0.2)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert "root cause: worker:0 did not end when others did" in err


def test_a_rank_that_is_lost_again_and_again_is_left_out_and_taken_in_again(
    launcher: Launcher,
) -> None:
    killed = -signal.SIGKILL
    command = by_plan({1: [killed, killed], 2: [0, 0, 200]})
    process = launcher.run("-np", "3", "--max-restarts", "5", "--min-np", "2", *command)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert lines_of(out, "worker:0") == [
        "life 1 of slot 1 with 3",
        "life 2 of slot 1 with 3",
        "life 3 of slot 2 with 2",
        "life 3 of slot 1 with 3",
    ]
    assert lines_of(out, "chief:0") == [
        f"life {life} of slot 0 with {size}" for life, size in enumerate((3, 3, 2, 3), 1)
    ]
    assert "the next begins in 0.02 s, without slot 1" in err
    left = f"chief:0 {EARLY} (worker:0 (slot 2): exit code 200 (PeerLostError))"
    assert f"root cause: {left}" in err


def test_the_first_of_the_slots_in_use_is_chief(launcher: Launcher) -> None:
    command = by_plan({0: [-signal.SIGSEGV, -signal.SIGSEGV]})
    process = launcher.run("-np", "2", "--max-restarts", "5", "--min-np", "1", *command)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert lines_of(out, "chief:0")[-1] == "life 3 of slot 1 with 1"


def test_a_ring_that_is_not_elastic_keeps_its_size(launcher: Launcher) -> None:
    process = launcher.run("-np", "2", "--max-restarts", "3", *by_plan({1: [200 - 5] * 9}))
    out, err = process.communicate(timeout=30)
    assert process.returncode == 195, err
    assert len(lines_of(out, "worker:0")) == 4


def test_ranks_are_told_to_restore_an_earlier_checkpoint(launcher: Launcher) -> None:
    code = "import os; print(os.environ.get('HOSTOPT_RESTORE_PREVIOUS'))"
    for arguments, found in (([], "None"), (["--restore-previous"], "true")):
        process = launcher.run("-np", "1", *arguments, *python(code))
        out, _ = process.communicate(timeout=30)
        assert lines_of(out, "chief:0") == [found]


# --- evaluators -------------------------------------------------------------------------------


def test_an_evaluator_lives_on_while_the_ring_is_started_again(launcher: Launcher) -> None:
    then = """
        if config["task"]["type"] == "evaluator":
            note("evaluator")
            while len(list(pathlib.Path(os.environ["NOTES"]).glob("slot0.*"))) < 3:
                time.sleep(0.01)
            print("saw it")
        else:
            while not list(pathlib.Path(os.environ["NOTES"]).glob("evaluator.*")):
                time.sleep(0.01)
            if life < 3:
                sys.exit(200)
    """
    process = launcher.run(
        "-np", "1", "--evaluators", "1", "--max-restarts", "2", *by_plan({}, then), grace_s=0.0
    )
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert lines_of(out, "evaluator:0") == ["saw it"]
    assert len(launcher.pids("evaluator", 1)) == 1


def test_an_evaluator_that_was_killed_comes_again_at_its_address(launcher: Launcher) -> None:
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
    process = launcher.run(
        "-np", "1", "--evaluators", "1", "--max-restarts", "2", *by_plan({}, then)
    )
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert len(lines_of(out, "evaluator:0")) == 3
    assert len(set(lines_of(out, "evaluator:0"))) == 1
    assert len(lines_of(out, "chief:0")) == 1  # training went on
    assert "evaluator:0 failed: exit code 137 (SIGKILL); it begins again in" in err


def test_an_evaluator_ends_with_a_ring_that_has_given_up(launcher: Launcher) -> None:
    then = """
        if config["task"]["type"] == "evaluator":
            note("evaluator")
            time.sleep(600)
        while not list(pathlib.Path(os.environ["NOTES"]).glob("evaluator.*")): time.sleep(0.01)
        sys.exit(201)
    """
    process = launcher.run(
        "-np", "1", "--evaluators", "1", "--max-restarts", "1", *by_plan({}, then), grace_s=0.0
    )
    _, err = process.communicate(timeout=30)
    assert process.returncode == 201, err
    assert len(launcher.pids("evaluator", 1)) == 1


# --- signals ----------------------------------------------------------------------------------

# A rank that answers a signal as a training does: it saves, which takes a while, then it ends.
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
    [(signal.SIGINT, 0.1), (signal.SIGTERM, 30.0)],  # the former has no deadline
    ids=["SIGINT", "SIGTERM"],
)
def test_after_a_signal_ranks_have_time_to_save_and_are_not_started_again(
    launcher: Launcher, signum: signal.Signals, preemption_s: float
) -> None:
    command = ("-np", "2", "--max-restarts", "3", *by_plan({}, SAVES))
    process = launcher.run(*command, grace_s=0.0, kill_s=0.0, preemption_s=preemption_s)
    launcher.pids("ready", 2)
    process.send_signal(signum)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signum, err
    assert len(launcher.pids("saved", 2)) == 2
    assert [lives(launcher, slot) for slot in (0, 1)] == [1, 1]
    assert "sending" not in err


def test_who_does_not_end_after_a_signal_is_killed(launcher: Launcher) -> None:
    then = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note("ready")
        while True: time.sleep(1)
    """
    process = launcher.run("-np", "2", "--max-restarts", "3", *by_plan({}, then), preemption_s=0.5)
    launcher.pids("ready", 2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 143, err
    assert "sending SIGKILL to chief:0, worker:0" in err


def test_a_checkpoint_that_cannot_be_saved_after_a_signal_is_an_error(launcher: Launcher) -> None:
    then = SAVES.replace("sys.exit(128 + signum)", "sys.exit(74 if slot == 0 else 200)")
    process = launcher.run("-np", "2", "--max-restarts", "3", *by_plan({}, then))
    launcher.pids("ready", 2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 74, err
    assert "root cause: chief:0: exit code 74 (CheckpointError)" in err


def test_ranks_that_one_has_asked_to_save_have_time_and_are_started_again(
    launcher: Launcher,
) -> None:
    """Somebody sends SIGTERM to one rank, which tells the others."""
    then = """
        if life == 1 and slot == 0:
            while not list(pathlib.Path(os.environ["NOTES"]).glob("slot1.*")): time.sleep(0.01)
            sys.exit(143)
        if life == 1:
            time.sleep(1.0)
            note("saved")
            sys.exit(143)
    """
    process = launcher.run(
        "-np", "2", "--max-restarts", "3", *by_plan({}, then), grace_s=0.0, kill_s=0.0
    )
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert len(launcher.pids("saved", 1)) == 1
    assert [lives(launcher, slot) for slot in (0, 1)] == [2, 2]


def test_a_signal_ends_the_wait_for_the_next_attempt(launcher: Launcher) -> None:
    command = by_plan({0: [200]}, "note('evaluator'); time.sleep(600)")
    process = launcher.run(
        "-np", "1", "--evaluators", "1", "--max-restarts", "3", *command, delay_s=600.0
    )
    launcher.pids("evaluator", 1)
    assert process.stderr is not None
    until(lambda: "the next begins in 600 s" in process.stderr.readline(), "back-off")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    assert lives(launcher, 0) == 1


def test_no_orphan_when_the_launcher_is_killed_in_a_later_attempt(launcher: Launcher) -> None:
    command = by_plan({0: [200], 1: [200]}, "note('ready'); time.sleep(600)")
    process = launcher.run("-np", "2", "--max-restarts", "3", *command)
    ready = launcher.pids("ready", 2)
    family = psutil.Process(process.pid).children(recursive=True)
    assert set(ready) < {member.pid for member in family}
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: all(is_gone(member.pid) for member in family), "end of all descendants")


def test_nothing_is_started_again_unless_it_was_asked_for(launcher: Launcher) -> None:
    process = launcher.run("-np", "1", *by_plan({0: [200]}))
    assert process.wait(20) == 200
    assert lives(launcher, 0) == 1


def test_names_of_codes() -> None:
    assert restarts.describe(139) == "exit code 139 (SIGSEGV)"
    assert restarts.describe(202) == "exit code 202 (RendezvousTimeoutError)"
    assert restarts.describe(7) == "exit code 7"
