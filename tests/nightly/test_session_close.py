"""Sessions whose input is still busy when they are closed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import Rank, Ranks

BUSY = 1000  # examples, which keep the input from waiting


@pytest.mark.parametrize("examples", [[12], [BUSY, 12], [12, BUSY]])
def test_an_input_that_waits_forever_holds_up_no_end(
    tmp_path: Path, ranks: Ranks, examples: list[int]
) -> None:
    settings = {"examples": examples, "is_released": False, "exit_s": 1.0}
    started = run(tmp_path, ranks, settings)
    for rank, count in zip(started, examples):
        if count != BUSY:
            assert "a session has not closed within 5 s" in rank.output
            assert "a session is being closed" in rank.output
    assert "evaluated 3" in started[0].output
    assert "predicted [0.0, 1.0, 2.0, 3.0, 4.0]" in started[0].output


def test_a_program_exits_after_its_sessions_have_closed(tmp_path: Path, ranks: Ranks) -> None:
    settings = {"examples": [12], "is_released": True, "exit_s": 60.0}
    (rank,) = run(tmp_path, ranks, settings)
    assert "a session has not closed within 5 s" in rank.output
    assert "all sessions are closed" in rank.output


def run(directory: Path, ranks: Ranks, settings: dict[str, Any]) -> list[Rank]:
    arguments = [json.dumps({"model_dir": str(directory / "model"), **settings})]
    size = len(settings["examples"])
    return ranks.run("waiting_input.py", size, arguments=arguments, fresh=True)
