"""Sessions whose input is still busy when they are closed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import Ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.faults]

BUSY = 1000  # examples, which keep the input from waiting


@pytest.mark.parametrize("examples", [[12], [BUSY, 12], [12, BUSY]])
def test_an_input_that_waits_forever_holds_up_no_end(
    tmp_path: Path, ranks: Ranks, examples: list[int]
) -> None:
    settings = {"model_dir": str(tmp_path / "model"), "examples": examples}
    started = ranks.run("waiting_input.py", len(examples), arguments=[json.dumps(settings)])
    for rank, count in zip(started, examples):
        if count != BUSY:
            assert "a session has not closed within 5 s" in rank.output
    assert "evaluated 3" in started[0].output
    assert "predicted [0.0, 1.0, 2.0, 3.0, 4.0]" in started[0].output
