"""What a rank leaves behind when its ring is aborted: stacks, and its last events."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import Spawn

from hostopt.communicator import Communicator
from hostopt.errors import HostOptError


def stand_still_in_user_code(communicator: Communicator) -> None:
    told = threading.Event()
    communicator.transport.mailbox.on_failure(lambda error: told.set())  # after the records' own
    assert told.wait(30)
    communicator.transport._finish_record()


def fail(communicator: Communicator) -> HostOptError | None:
    """100 steps, then rank 1 is stuck and the others give up."""
    for step in range(100):
        communicator.all_reduce(np.ones(9), what=f"step {step}")
    try:
        if communicator.rank == 1:
            stand_still_in_user_code(communicator)
            return None
        communicator.all_reduce(np.ones(9), what="the last")
    except HostOptError as error:
        return error
    raise AssertionError("this is not reached")


def test_stacks_and_events_of_every_rank(spawn: Spawn, tmp_path: Path) -> None:
    directory = tmp_path / "model" / "hostopt-debug"
    errors = spawn(3, fail, debug_dir=str(directory), collective_timeout_s=1.0)
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
        assert [what.startswith("the last (") for what in waits] == [True] * (rank != 1)
    assert [error is None for error in errors] == [False, True, False]


def test_a_directory_that_hangs_keeps_the_error_from_nobody(spawn: Spawn, tmp_path: Path) -> None:
    for rank in range(3):
        os.mkfifo(tmp_path / f"rank_{rank}.stacks.txt")  # to open it waits for a reader
    errors = spawn(3, fail, debug_dir=str(tmp_path), collective_timeout_s=1.0)
    assert [error is None for error in errors] == [False, True, False]
    for rank in range(3):  # let the threads end
        os.close(os.open(tmp_path / f"rank_{rank}.stacks.txt", os.O_RDONLY | os.O_NONBLOCK))


def test_nothing_is_left_where_all_goes_well(spawn: Spawn, tmp_path: Path) -> None:
    def work(communicator: Communicator) -> None:
        communicator.all_reduce(np.ones(9))

    spawn(2, work, debug_dir=str(tmp_path / "debug"))
    assert not (tmp_path / "debug").exists()


def test_a_directory_that_cannot_be_made_hides_no_error(
    spawn: Spawn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        errors = spawn(3, fail, debug_dir=str(tmp_path / "file" / "x"), collective_timeout_s=1.0)
    assert [error is None for error in errors] == [False, True, False]
    assert "no stacks and events written" in caplog.text
