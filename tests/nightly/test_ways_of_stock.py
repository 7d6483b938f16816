"""Stock programs on one and two ranks: input tensors, early stopping, later evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from harness import reserved_addresses
from programs import ways_of_stock
from ranks import Rank, Ranks

from estimator_ext._tf_estimator._loading import knows_estimator

PROGRAM = "ways_of_stock.py"
LIMITS = "input_fn returned tensors, not a tf.data.Dataset"


def result_of(rank: Rank) -> dict[str, Any]:
    """Parses the last output of a rank."""
    return json.JSONDecoder().raw_decode(rank.output.split("FOUND ")[1])[0]


def run(ranks: Ranks, size: int, **settings: Any) -> list[dict[str, Any]]:
    return [result_of(r) for r in ranks.run(PROGRAM, size, arguments=[json.dumps(settings)])]


def trained_by_hand(steps: int) -> np.ndarray:
    """Computes the weights after gradient descent on all rows."""
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


def test_one_log_line_names_what_input_tensors_do_not_support(
    tmp_path: Path, ranks: Ranks
) -> None:
    both = [f"{LIMITS}: a rank whose data end early", "(exact resume). Return a dataset"]
    for size, tensors, message in ((1, True, both[1:]), (2, True, both), (2, False, [])):
        settings = {"model_dir": str(tmp_path / f"{size}{tensors}"), "tensors": tensors}
        started = ranks.run(PROGRAM, size, arguments=[json.dumps(settings)])
        output = "".join(rank.output for rank in started)
        assert output.count(LIMITS) == bool(message), output
        assert all(text in output for text in message), output


# -- evaluation and prediction after training ----------------------------------------------


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_a_rank_without_access_to_the_checkpoint_cannot_evaluate(
    tmp_path: Path, ranks: Ranks, call: str
) -> None:
    with reserved_addresses(2) as addresses:
        first, second = ranks.start(
            PROGRAM,
            {"worker": addresses},
            arguments=[json.dumps({"then": [call]})],
            task_arguments={
                f"worker:{i}": [json.dumps({"model_dir": str(tmp_path / str(i))})]
                for i in range(2)
            },
        )
        assert second.wait() == 74, second.output
        first.wait()
    message = (
        f"cannot {call} on rank 1 (worker:1, {addresses[1]}): {tmp_path / '1'} has no checkpoint "
        f"here, as rank 0 alone writes them. Call {call} on rank 0 alone (if estimator.config."
        "is_chief), or give all ranks a shared model_dir"
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
    """They check after the first step and every 60 s; one rank stops, and the others follow."""
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
def test_a_hook_that_requests_a_stop_on_one_rank_stops_all(
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


# -- train_and_evaluate without a HostOffloadStrategy --------------------------------------


def test_the_stock_function_trains_with_the_stock_strategy(tmp_path: Path, ranks: Ranks) -> None:
    """Requires a TensorFlow with the integration of strategies and Estimator."""
    with reserved_addresses(2) as addresses:
        arguments = [str(tmp_path / "model")]
        started = ranks.start("mirrored.py", {"worker": addresses}, arguments=arguments)
        codes = [rank.wait() for rank in started]
    for rank, code in zip(started, codes):
        if knows_estimator():
            assert code == 0, rank.output
            assert "ENDED at step 5" in rank.output
        else:
            assert code != 0
            assert "UnsupportedError: tf.estimator.Estimator cannot work with" in rank.output


def tensors() -> Any:
    return tf.constant(ways_of_stock.X), tf.constant(ways_of_stock.Y)


# -- the job "master" ----------------------------------------------------------------------


@pytest.mark.parametrize("api", ["train", "ours", "stock"])
def test_a_master_trains_with_a_worker(tmp_path: Path, ranks: Ranks, api: str) -> None:
    settings = {
        "model_dir": str(tmp_path / "model"),
        "optimizers": ["adam"],
        "api": api,
        "steps": 10,
        "checkpoint_steps": 5,
    }
    with reserved_addresses(2) as (master, worker):
        started = ranks.start(
            "train.py", {"master": [master], "worker": [worker]}, arguments=[json.dumps(settings)]
        )
        for rank in started:
            assert rank.wait() == 0, rank.output
    model_dir = tmp_path / "model" / "adam"
    assert tf.train.load_variable(str(model_dir), "global_step") == 10
    if api != "train":  # both evaluate in the master
        assert list((model_dir / "eval").glob("events.*"))
        assert "Saving dict for global step 10" in started[0].output


# -- a global_step that stands still -------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_a_constant_global_step_is_refused_at_once(
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
