"""Errors of the user's code on one rank: sent to all, and not mistaken for the end of the data.

Two processes train with many errors, one after the other, and report how each training ended; and
once an error ends both processes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from ranks import Ranks, caught

BUILDING = ["model_fn", "host_call"]  # while the graph is built; all others in the third step
# Code that raises, error, and rank.
RUNS = [
    ("model_fn", "ZeroDivisionError", 0),
    ("host_call", "ZeroDivisionError", 1),
    ("model_fn op", "ZeroDivisionError", 1),
    ("model_fn op", "StopIteration", 0),
    ("branch", "StopIteration", 0),
    ("host_call op", "StopIteration", 0),
    ("host_call op", "StopIteration", 1),
    ("host_call op", "UnavailableError", 0),
    ("input_fn", "ZeroDivisionError", 1),
    ("input_fn", "StopIteration", 0),
    ("input_fn", "UnavailableError", 0),
    ("hook", "StopIteration", 0),
    ("hook", "UnavailableError", 1),
    ("hook after a step", "StopIteration", 1),
    ("hook after a step", "UnavailableError", 0),
]


class Ends:
    """Results of the trainings.

    Args:
      directory: directory of checkpoints and output.
    """

    def __init__(self, directory: Path) -> None:
        runs = []
        for place, kind, rank in RUNS:
            at = 1 if place in BUILDING else 3
            settings = {"raise_in": place, "raise_kind": kind, "raise_at": at}
            model_dir = str(directory / f"{place}-{kind}-{rank}")
            runs.append({"model_dir": model_dir, "rank_settings": {str(rank): settings}})
        common = {"optimizers": ["adam"], "steps": 6, "checkpoint_steps": 2, "catch": True}
        with Ranks(directory) as ranks:
            started = ranks.run("train.py", 2, arguments=[json.dumps({**common, "runs": runs})])
        self._ends = [caught(rank) for rank in started]
        self._directory = directory

    def of(self, place: str, kind: str, rank: int) -> list[dict[str, Any]]:
        """Returns the error of the rank that raised it, and of the other one."""
        result = [each[RUNS.index((place, kind, rank))] for each in self._ends]
        return result if rank == 0 else result[::-1]

    def checkpoint(self, place: str, kind: str, rank: int) -> str | None:
        """Returns the newest checkpoint."""
        return tf.train.latest_checkpoint(str(self._directory / f"{place}-{kind}-{rank}" / "adam"))


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return Ends(tmp_path_factory.mktemp("errors"))


@pytest.mark.parametrize(("place", "kind", "rank"), RUNS)
def test_an_error_ends_the_training_of_all_ranks_and_saves_nothing(
    ends: Ends, place: str, kind: str, rank: int
) -> None:
    error, other = ends.of(place, kind, rank)
    assert error is not None
    assert other is not None
    assert (error["code"], other["code"]) == (1, 200)
    assert kind in error["text"]
    assert f"raised in {place}" in error["text"]
    assert f"rank {rank} (worker:{rank}, " in other["message"]
    assert "stopped with an error. Root cause: " in other["message"]
    assert f"raised in {place}" in other["message"]
    checkpoint = ends.checkpoint(place, kind, rank)
    if place in BUILDING:
        assert checkpoint is None
    else:  # the input may be ahead of the step
        saved = ("ckpt-0", "ckpt-2") if place == "input_fn" else "ckpt-2"
        assert str(checkpoint).endswith(saved)


def test_an_error_that_looks_like_the_end_of_the_data_ends_both_processes(
    tmp_path: Path, ranks: Ranks
) -> None:
    chosen = {"model_dir": str(tmp_path), "optimizers": ["adam"]}
    settings = {"raise_in": "host_call op", "raise_kind": "StopIteration"}
    first, second = ranks.run(
        "train.py",
        2,
        codes=[200, 1],
        arguments=[json.dumps(chosen)],
        task_arguments={"worker:1": [json.dumps(settings)]},
    )
    assert "StopIteration: raised in host_call op" in second.output
    assert re.search(r"rank 1 \(worker:1, 127.0.0.1:\d+\) stopped with an error", first.output)
    assert "raised in host_call op" in first.output
