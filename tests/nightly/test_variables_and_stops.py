"""Variables that each rank changes by itself, other kinds of variables, and agreed stops."""

from __future__ import annotations

import numpy as np
import pytest
from programs import train
from train_runs import Runs, Trainings, check_equal

AVERAGES = {"model": "averages", "checkpoint_steps": 4, "steps": 10}
RUNS: Runs = {
    1: {
        "averages": AVERAGES,
        "averages, 14 steps": {**AVERAGES, "steps": 14},
        "variables": {"model": "variables"},
    },
    2: {
        "averages": AVERAGES,
        # the data repeat after 7 steps
        "averages, 7 steps": {**AVERAGES, "steps": 7, "model_dir": "resumed"},
        "averages, resumed": {**AVERAGES, "steps": 14, "model_dir": "resumed"},
        "batch_norm": {"model": "batch_norm", "checkpoint_steps": 5, "summary_steps": 1},
        "batch_norm, data that end": {"model": "batch_norm", "batches": 6, "steps": 60},
        "variables": {"model": "variables"},
        "early stopping": {"steps": 1000, "early_stopping": True},
        "rank 0 asks": {"steps": 1000, "asking": 0},
        "rank 1 asks": {"steps": 1000, "asking": 1},
        "max_steps": {"steps": 7},
    },
    3: {"averages": AVERAGES},
}


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("trainings"), RUNS)


# -- variables that each rank changes by itself ----------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_every_checkpoint_holds_aggregated_variables(trainings: Trainings, size: int) -> None:
    for step in (4, 8, 10):
        for name in ("moving", "seen"):
            result, expected = (
                trainings.checkpoint(s, "averages", step).get_tensor(name) for s in (size, 1)
            )
            np.testing.assert_allclose(result, expected, rtol=0, atol=1e-12, err_msg=name)


def test_per_rank_variables_differ_between_ranks(trainings: Trainings) -> None:
    many = trainings.variables(3, "averages")
    assert many[1]["seen"] == many[2]["seen"] == 10 * 12 // 3  # in its part of the data
    assert np.abs(many[1]["moving"] - many[2]["moving"]).max() > 1e-3


def test_a_resumed_training_restores_the_sum_and_the_mean(trainings: Trainings) -> None:
    result = trainings.checkpoint(2, "averages, resumed", 14)
    expected = trainings.checkpoint(1, "averages, 14 steps", 14)
    for name in ("moving", "seen"):
        np.testing.assert_allclose(
            result.get_tensor(name), expected.get_tensor(name), rtol=0, atol=1e-12, err_msg=name
        )


@pytest.mark.parametrize(
    ("name", "steps"), [("batch_norm", [5, 10, 15, 20]), ("batch_norm, data that end", [6])]
)
def test_moving_averages_of_batch_norm_are_the_mean_over_the_ranks(
    trainings: Trainings, name: str, steps: list[int]
) -> None:
    x, _ = train.arrays("float64", "batch_norm")
    halves = [x[:, :6], x[:, 6:]]  # of the ranks
    mean, variance = np.zeros((2, 5)), np.ones((2, 5))
    for step in range(1, steps[-1] + 1):
        batches = [half[(step - 1) % train.BATCHES] for half in halves]
        mean += 0.125 * (np.array([batch.mean(0) for batch in batches]) - mean)
        variance += 0.125 * (np.array([batch.var(0) for batch in batches]) - variance)
        if step in steps:
            saved = trainings.checkpoint(2, name, step)
            for moment, values in (("mean", mean), ("variance", variance)):
                result = saved.get_tensor(f"batch_normalization/moving_{moment}")
                np.testing.assert_allclose(result, values.mean(0), rtol=0, atol=1e-12)


def test_partitioned_shared_and_integer_variables(trainings: Trainings) -> None:
    one, two = trainings.variables(1, "variables"), trainings.variables(2, "variables")
    parts = [f"kinds/parts/part_{i}" for i in range(2)]
    assert {*parts, "kinds/shared", "kinds/runs"} < set(one[0])
    check_equal(two, one)
    assert one[0]["kinds/runs"] == 20
    assert all(one[0][part].all() for part in parts)  # they have been trained


# -- agreed stops --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rank 0 asks", "rank 1 asks"])
def test_a_stop_request_stops_all_ranks_after_the_same_step(
    trainings: Trainings, name: str
) -> None:
    many = trainings.variables(2, name)
    assert [int(each["global_step"]) for each in many] == [6, 6]
    assert trainings.checkpoint(2, name, 6).get_tensor("global_step") == 6


def test_early_stopping_of_tensorflow_stops_all_ranks(trainings: Trainings) -> None:
    first, second = (int(each["global_step"]) for each in trainings.variables(2, "early stopping"))
    assert 6 <= first == second <= 9


def test_training_ends_exactly_at_max_steps(trainings: Trainings) -> None:
    many = trainings.variables(2, "max_steps")
    assert [int(each["global_step"]) for each in many] == [7, 7]
