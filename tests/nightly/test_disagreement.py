"""Ranks with different updates or variables: the difference is detected and named.

Two processes train with many settings, one after the other, and report how each training ended.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from ranks import Ranks, caught

# Settings of both ranks; "rank_settings" apply to one of them.
RUNS: dict[str, dict[str, Any]] = {
    "learning rate": {"rank_settings": {"1": {"learning_rate": 0.02}}},
    "optimizer": {"rank_settings": {"1": {"optimizers": ["sgd"]}}},
    "clip norm": {"clip": 1.0, "rank_settings": {"1": {"clip": 5.0}}},
    "changed": {"checkpoint_steps": 2, "rank_settings": {"1": {"change_at": 4}}},
    # trainings without a difference
    "mlp": {"rank_settings": {"1": {"rotated": True}}},
    "uneven batch_norm": {"model": "batch_norm", "lengths": [[4, 4, 4, 2], [4, 3]]},
    "micro-batches": {"lengths": [[4] * 6] * 2, "accumulate_steps": 3},
    "embedding": {"model": "embedding", "clip": 0.05},
    "averages": {"model": "averages"},
    "variables": {"model": "variables"},
    "scaled loss": {"loss_scale": True},
    "early stopping": {"steps": 1000, "early_stopping": True},
    "rank 1 asks": {"steps": 1000, "asking": 1},
}
HEALTHY = list(RUNS)[4:]


class Ends:
    """Results of the trainings.

    Args:
      directory: directory of checkpoints and output.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        runs = [{**chosen, "model_dir": str(directory / name)} for name, chosen in RUNS.items()]
        common = {"optimizers": ["adam"], "steps": 6, "desync_check_steps": 1, "catch": True}
        with Ranks(directory) as ranks:
            started = ranks.run("train.py", 2, arguments=[json.dumps({**common, "runs": runs})])
        self._ends = [caught(rank) for rank in started]

    def of(self, name: str) -> list[dict[str, Any] | None]:
        """Returns the error of each rank; None if it succeeded."""
        return [result[list(RUNS).index(name)] for result in self._ends]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return Ends(tmp_path_factory.mktemp("disagreement"))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("learning rate", ["lr=0.01, ", "lr=0.02, "]),
        ("optimizer", ["ResourceApplyAdam(", "ResourceApplyGradientDescent("]),
        ("clip norm", ["Mul(1.0, ", "Mul(5.0, "]),
    ],
)
def test_a_different_update_on_one_rank_is_reported_before_the_first_step(
    ends: Ends, name: str, values: list[str]
) -> None:
    for error in ends.of(name):
        assert error is not None
        assert error["code"] == 65, error["text"]
        part = error["message"].split("'dense/kernel': rank 0 has ")[1]
        first, second = part.split("; ")[0].split(", rank 1 has ")
        assert values[0] in first
        assert values[1] in second
        assert "the updates of variables differ between rank 0 (worker:0, " in error["message"]
    assert not list((ends.directory / name).glob("*/checkpoint"))


def test_a_variable_changed_on_one_rank_is_detected_and_not_saved(ends: Ends) -> None:
    for error in ends.of("changed"):
        assert error is not None
        assert error["code"] == 65, error["text"]
        assert (
            "after step 4 variable 'dense/kernel' differs between rank 0 (worker:0, "
            in (error["message"])
        )
        assert "and rank 1 (worker:1, " in error["message"]
    latest = tf.train.latest_checkpoint(str(ends.directory / "changed" / "adam"))
    assert latest.endswith("model.ckpt-2")


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_training_raises_no_alarm(ends: Ends, name: str) -> None:
    assert ends.of(name) == [None, None]
