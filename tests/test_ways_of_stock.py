"""The ways of stock programs on one and two ranks: tensors, early stopping, evaluation after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from programs import ways_of_stock
from ranks import Rank, Ranks, reserved_addresses

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(180)]

PROGRAM = "ways_of_stock.py"
LIMITS = "input_fn returned tensors, not a tf.data.Dataset"


def found(rank: Rank) -> dict[str, Any]:
    """What a rank has printed in the end."""
    return json.JSONDecoder().raw_decode(rank.output.split("FOUND ")[1])[0]


def run(ranks: Ranks, size: int, **settings: Any) -> list[dict[str, Any]]:
    return [found(r) for r in ranks.run(PROGRAM, size, arguments=[json.dumps(settings)])]


def trained_by_hand(steps: int) -> np.ndarray:
    """Weights after gradient descent on all rows."""
    x, y = ways_of_stock.X, ways_of_stock.Y
    weights = np.zeros((3, 1))
    for _ in range(steps):
        weights -= ways_of_stock.RATE * 2 / len(x) * x.T @ (x @ weights - y)
    return weights


# -- input_fn returns tensors --------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_tensors_train_evaluate_and_predict(tmp_path: Path, ranks: Ranks, size: int) -> None:
    then = ["evaluate", "predict"]
    results = run(ranks, size, model_dir=str(tmp_path / "model"), steps=5, then=then)
    weights = trained_by_hand(5)
    saved = tf.train.load_variable(str(tmp_path / "model"), "w")
    np.testing.assert_allclose(saved, weights, rtol=1e-12)
    outputs = ways_of_stock.X @ weights
    for result in results:  # each process works by itself, on all data
        np.testing.assert_allclose(result["predictions"], outputs, rtol=1e-9)
        loss = np.mean((outputs - ways_of_stock.Y) ** 2)
        np.testing.assert_allclose(result["metrics"]["loss"], loss, rtol=1e-6)
        assert result["metrics"]["global_step"] == 5


def test_one_line_says_what_tensors_do_not_have(tmp_path: Path, ranks: Ranks) -> None:
    both = [f"{LIMITS}: a rank whose data end early", "(exact resume). Return a dataset"]
    for size, tensors, said in ((1, True, both[1:]), (2, True, both), (2, False, [])):
        settings = {"model_dir": str(tmp_path / f"{size}{tensors}"), "tensors": tensors}
        started = ranks.run(PROGRAM, size, arguments=[json.dumps(settings)])
        output = "".join(rank.output for rank in started)
        assert output.count(LIMITS) == bool(said), output
        assert all(text in output for text in said), output


# -- evaluation and prediction after training ----------------------------------------------


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_a_rank_without_the_files_of_rank_0_cannot_evaluate(
    tmp_path: Path, ranks: Ranks, call: str
) -> None:
    with reserved_addresses(2) as addresses:
        first, second = ranks.start(
            PROGRAM,
            {"worker": addresses},
            arguments=[json.dumps({"then": [call]})],
            own={
                f"worker:{i}": [json.dumps({"model_dir": str(tmp_path / str(i))})]
                for i in range(2)
            },
        )
        assert second.wait() == 74, second.output
        first.wait()
    message = (
        f"cannot {call} on rank 1 (worker:1, {addresses[1]}): {tmp_path / '1'} has no checkpoint "
        f"here, as rank 0 alone writes them. Call {call} on rank 0 alone (if estimator.config."
        "is_chief), or give all ranks one model_dir that they share"
    )
    assert message in second.output
    assert "FOUND" in first.output


# -- early stopping ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "call", ["stop_if_lower_hook", "stop_if_higher_hook", "stop_if_no_decrease_hook"]
)
def test_hooks_of_early_stopping_with_their_defaults(
    tmp_path: Path, ranks: Ranks, call: str, size: int
) -> None:
    """They look at the first step, and then every 60 s: one stops there, others do not refuse."""
    criterion = {
        "stop_if_lower_hook": {"metric_name": "loss", "threshold": 1e6},
        "stop_if_higher_hook": {"metric_name": "loss", "threshold": -1.0},
        "stop_if_no_decrease_hook": {"metric_name": "loss", "max_steps_without_decrease": 0},
    }[call]
    results = run(
        ranks,
        size,
        model_dir=str(tmp_path / "model"),
        then=["evaluate"],
        stop=[call, criterion],
    )
    steps = {result["stopped"] for result in results}
    assert len(steps) == 1
    assert steps <= {6, 7}  # where one rank asks all stop one step later


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "every",
    [
        {"run_every_secs": 0.01},
        {"run_every_secs": None, "run_every_steps": 3},
    ],
)
def test_a_hook_that_asks_on_one_rank_stops_all(
    tmp_path: Path, ranks: Ranks, every: dict[str, Any], size: int
) -> None:
    results = run(
        ranks, size, model_dir=str(tmp_path / "model"), stop=["make_early_stopping_hook", every]
    )
    steps = {result["stopped"] for result in results}
    assert len(steps) == 1
    assert steps.pop() < 100_000
    if "run_every_steps" in every:  # it looks after steps 6, 9 and 12, or sees each step late
        assert results[0]["stopped"] - size in (11, 12)


# -- a global_step that stands still -------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_a_global_step_that_stands_still_is_refused_at_once(
    tmp_path: Path, ranks: Ranks, size: int
) -> None:
    settings = {"model_dir": str(tmp_path / "model"), "counts": False, "tensors": False}
    with reserved_addresses(size) as addresses:
        started = ranks.start(PROGRAM, {"worker": addresses}, arguments=[json.dumps(settings)])
        codes = [rank.wait() for rank in started]
    assert set(codes) <= {1, 200}
    assert 1 in codes
    for rank in started:
        assert "ValueError: global_step would stay as it is for ever" in rank.output
    assert not list((tmp_path / "model").glob("*.index"))
