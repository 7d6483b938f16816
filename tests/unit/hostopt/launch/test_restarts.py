"""The rules for restarts: root causes, delays, and slots that are left out."""

from __future__ import annotations

import pytest

from hostopt.launch import restarts
from hostopt.launch.restarts import Restarts, Slots, TaskExit, classify_exits, is_permanent

EARLY = "exited with code 0 before the other tasks"


def exits(*codes: int, forced: tuple[int, ...] = ()) -> list[TaskExit]:
    """Exits of ranks 0, 1, ... in the order in which the launcher sees them."""
    return [TaskExit(f"rank{i}", i, code, i in forced) for i, code in enumerate(codes)]


@pytest.mark.parametrize("code", [1, 2, 65, 70, 74, 77, 78, 79])
def test_permanent_exit_codes_are_not_retried(code: int) -> None:
    for observed in (exits(200, code, 137), exits(code, 200)):
        decision = classify_exits(observed)
        assert (decision.code, decision.retry) == (code, False)


@pytest.mark.parametrize("code", [76, 130, 134, 137, 139, 143, 193, 200, 201, 202, 203, 255])
def test_retryable_exit_codes(code: int) -> None:
    decision = classify_exits(exits(0, code))
    assert (decision.code, decision.retry) == (code, True)


def test_success_is_not_retried() -> None:
    decision = classify_exits(exits(0, 0))
    assert (decision.code, decision.retry) == (0, False)


def test_a_killed_rank_is_the_root_cause_rather_than_its_reporters() -> None:
    decision = classify_exits(exits(200, 200, 137))
    assert (decision.code, decision.failed_slots) == (137, {2})
    assert decision.reason == "rank2: exit code 137 (SIGKILL)"


def test_a_rank_that_failed_by_itself_is_the_root_cause_rather_than_its_reporters() -> None:
    decision = classify_exits(exits(200, 195, 200))
    assert (decision.code, decision.failed_slots) == (195, {1})


def test_a_rank_that_did_not_exit_in_time_is_the_root_cause() -> None:
    decision = classify_exits(exits(200, 143, 200, forced=(1,)))
    assert (decision.code, decision.failed_slots) == (200, {1})
    assert decision.reason == ("rank1 did not exit in time (rank0: exit code 200 (PeerLostError))")


def test_no_slot_failed_if_there_are_only_reporters() -> None:
    decision = classify_exits(exits(76, 76))
    assert (decision.code, decision.retry, decision.failed_slots) == (76, True, frozenset())
    assert decision.reason == "rank0: exit code 76 (ProtocolError)"


def test_a_rank_without_file_descriptors_failed_by_itself() -> None:
    decision = classify_exits(exits(0, 200, 203))
    assert (decision.code, decision.retry, decision.failed_slots) == (203, True, {2})


@pytest.mark.parametrize("code", [200, 201, 202])
def test_a_rank_that_exited_early_with_0_is_the_root_cause(code: int) -> None:
    decision = classify_exits(exits(0, code, code))
    assert (decision.code, decision.retry, decision.failed_slots) == (code, True, frozenset())
    assert decision.reason.startswith(f"rank0 {EARLY} (rank1: exit code {code} (")


def test_a_task_that_the_launcher_ended_is_not_the_root_cause() -> None:
    assert classify_exits(exits(1, 200, forced=(0,))).code == 200


def test_delays_double_up_to_a_minute_and_reset_after_a_long_attempt() -> None:
    delays = Restarts(12)
    assert [delays.next_delay_s(1.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [delays.next_delay_s(lasted_s) for lasted_s in (60.1, 1.0, 61.0)] == [1, 2, 1]
    assert delays.next_delay_s(1.0) == 2
    assert delays.next_delay_s(1.0) is None


def test_a_slot_is_left_out_after_two_failures_in_a_row_and_rejoins() -> None:
    slots = Slots(4, 2)
    used = []
    for failed_slots in [{1}, {1}, {3}, {1}, {0}, set()]:
        slots.choose(failed_slots)
        used.append(slots.in_use)
    assert used == [
        [0, 1, 2, 3],
        [0, 2, 3],
        [0, 1, 2, 3],
        [0, 2, 3],  # its third failure in a row
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]


def test_failures_not_in_a_row_leave_no_slot_out() -> None:
    slots = Slots(3, 1)
    for failed_slots in [{1}, {2}, {1}, set(), {1}]:
        slots.choose(failed_slots)
        assert slots.in_use == [0, 1, 2]


def test_no_more_slots_are_left_out_than_allowed() -> None:
    slots = Slots(3, 2)
    for _ in range(2):
        slots.choose({0, 1})
    assert slots.in_use == [1, 2]


def test_no_slot_is_left_out_if_all_failed() -> None:
    slots = Slots(2, 1)
    for _ in range(3):
        slots.choose({0, 1})
    assert slots.in_use == [0, 1]


def test_descriptions_of_exit_codes() -> None:
    assert restarts.describe(139) == "exit code 139 (SIGSEGV)"
    assert restarts.describe(202) == "exit code 202 (RendezvousTimeoutError)"
    assert restarts.describe(7) == "exit code 7"


def test_failures_do_not_count_for_a_slot_that_has_moved_to_another_machine() -> None:
    slots = Slots(3, 2)
    slots.use({0: "a", 1: "b", 2: "c"})
    slots.choose({1})
    slots.use({0: "a", 1: "spare", 2: "c"})
    slots.choose({1})
    assert slots.in_use == [0, 1, 2]
    slots.use({0: "a", 1: "spare", 2: "c"})
    slots.choose({1})
    assert slots.in_use == [0, 2]


def test_slots_without_a_place_are_wanted_again() -> None:
    slots = Slots(3, 1)
    slots.use({0: "a", 2: "c"})
    assert slots.in_use == [0, 2]
    slots.choose({2})
    assert slots.in_use == [0, 1, 2]


@pytest.mark.parametrize(
    ("code", "permanent"),
    [(0, False), (1, True), (76, False), (78, True), (128, True), (129, False), (200, False)],
)
def test_exit_codes_of_failures_that_would_happen_again(code: int, permanent: bool) -> None:
    assert is_permanent(code) == permanent
