"""The dump of an aborted ring: stacks, and the last events of each rank."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Optional

import numpy as np
import pytest
from clocks import Clock, until_blocked
from harness import until
from rings import Spawn

from hostopt.collectives.communicator import Communicator
from hostopt.errors import HostOptError
from hostopt.telemetry import flight_recorder

Fail = Callable[[Communicator], Optional[HostOptError]]
TIMEOUT_S = 300.0


@pytest.fixture
def fail(clock: Clock) -> Fail:
    """A function for each rank: after 100 steps rank 1 is stuck, and the others time out."""
    clock.govern_waits()
    ring: list[Communicator] = []

    def stand_still_in_user_code(communicator: Communicator) -> None:
        aborted = threading.Event()
        communicator.transport.mailbox.on_failure(
            lambda error: aborted.set()
        )  # called after the listener of the recorder
        clock.advance(TIMEOUT_S, *until_blocked(ring, communicator))
        assert aborted.wait(30)
        communicator.transport._wait_for_dump()

    def fail(communicator: Communicator) -> HostOptError | None:
        ring.append(communicator)
        for step in range(100):
            communicator.all_reduce(np.ones(9), name=f"step {step}")
        try:
            if communicator.rank == 1:
                return stand_still_in_user_code(communicator)
            communicator.all_reduce(np.ones(9), name="the last")
        except HostOptError as error:
            return error
        raise AssertionError("this is not reached")

    return fail


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for the end of a dump however long it takes."""
    monkeypatch.setattr(flight_recorder, "_DUMP_TIMEOUT_S", 60.0)


def test_every_rank_dumps_stacks_and_events(
    spawn: Spawn, fail: Fail, patient: None, tmp_path: Path
) -> None:
    directory = tmp_path / "model" / "hostopt-debug"
    errors = spawn(3, fail, debug_dir=str(directory), collective_timeout_s=TIMEOUT_S)
    assert {path.name for path in directory.iterdir()} == {
        f"rank_{rank}.{kind}" for rank in range(3) for kind in ("events.json", "stacks.txt")
    }
    assert "in stand_still_in_user_code" in (directory / "rank_1.stacks.txt").read_text()
    for rank in range(3):
        assert "most recent call first" in (directory / f"rank_{rank}.stacks.txt").read_text()
        record = json.loads((directory / f"rank_{rank}.events.json").read_text())
        assert record["error"]["kind"] == "CollectiveTimeoutError"
        assert record["error"]["facts"]["rank"] == 1
        events = record["events"]
        assert 100 <= len(events) <= 256
        ages_s = [event["ago_s"] for event in events]
        assert ages_s == sorted(ages_s, reverse=True)
        assert "step 99" in {event["what"].partition(" (")[0] for event in events}
        waits = [wait["what"] for wait in record["waits"]]
        assert [name.startswith("the last (") for name in waits] == [True] * (rank != 1)
    assert [error is None for error in errors] == [False, True, False]


def test_a_hanging_directory_does_not_delay_the_error(
    spawn: Spawn, fail: Fail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "_DUMP_TIMEOUT_S", 0.01)
    for rank in range(3):
        os.mkfifo(tmp_path / f"rank_{rank}.stacks.txt")  # opening the pipe waits for a reader
    errors = spawn(3, fail, debug_dir=str(tmp_path), collective_timeout_s=TIMEOUT_S)
    assert [error is None for error in errors] == [False, True, False]
    with contextlib.ExitStack() as stack:  # let the threads end
        for rank in range(3):
            pipe = os.open(tmp_path / f"rank_{rank}.stacks.txt", os.O_RDONLY | os.O_NONBLOCK)
            stack.callback(os.close, pipe)
        until(lambda: "hostopt-record" not in {t.name for t in threading.enumerate()}, "end")


def test_no_dump_without_an_error(spawn: Spawn, tmp_path: Path) -> None:
    def work(communicator: Communicator) -> None:
        communicator.all_reduce(np.ones(9))

    spawn(2, work, debug_dir=str(tmp_path / "debug"))
    assert not (tmp_path / "debug").exists()


def test_an_unwritable_directory_does_not_replace_the_error(
    spawn: Spawn, fail: Fail, patient: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        errors = spawn(
            3, fail, debug_dir=str(tmp_path / "file" / "x"), collective_timeout_s=TIMEOUT_S
        )
    assert [error is None for error in errors] == [False, True, False]
    assert "no stacks and events written" in caplog.text
