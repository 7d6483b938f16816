"""Loops with strategy.run on two ranks, in functions of TensorFlow 2 and eagerly."""

from __future__ import annotations

from typing import Any

import pytest
from keras_ranks import assert_equal, results_of

Results = tuple[dict[str, Any], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of("custom_loops.py", tmp_path_factory.mktemp("loops"))


def test_two_ranks_equal_one_process(results: Results) -> None:
    one, two = results
    assert len(one) == 8
    for case, expected in one.items():
        for rank in two:
            assert_equal(rank[case], expected, case)


@pytest.mark.parametrize("mode", ["function", "eager"])
def test_values_of_all_ranks(results: Results, mode: str) -> None:
    for rank, found in enumerate(each["values"][mode] for each in results[1]):
        assert found == {
            "sums": [3.0, [1.0, 1.0]],
            "mean": 0.5,
            "rows": [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]],
            "columns": [[0.0, 1.0, 1.0]] * 2,
            "merged": 1.0,
            "gradient": [12.0 * (rank + 1), 24.0 * (rank + 1)],
            "rank": float(rank),
            "total": 1.0,
            "mean of rows": pytest.approx([2 / 3, 2 / 3]),
            "gathered": [0, 1, 1],
        }


def test_variables_of_each_kind(results: Results) -> None:
    """Ranks add 1 and 2; created variables have the values of rank 0."""
    by_sum, by_mean, by_first, sum_on_read, mean_on_read = 4.0, 2.5, 2.0, 3.0, 1.5
    for rank in results[1]:
        kinds = [by_sum, by_mean, by_first, sum_on_read, mean_on_read]
        assert rank["variables"] == [*kinds, 5.0, 7.0]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no run", "its gradient is computed outside strategy.run"),
        ("no run in a function", "its gradient is computed outside strategy.run"),
        ("scope", "its gradient is computed outside strategy.run"),
        ("assign eagerly", "is updated in strategy.run with a value of this rank"),
        ("assign in a function", "is updated in strategy.run with a value of this rank"),
        ("assign random numbers", "is updated in strategy.run with a value of this rank"),
        ("manual", "its gradient is computed outside strategy.run"),
        ("applied outside", "an optimizer updates it outside strategy.run"),
        ("created outside", "was created outside strategy.scope()"),
        ("xla", "Set jit_compile=False"),
        (
            "endless",
            "some ranks have endless datasets, and others not (rank 0: 2, rank 1: endless)",
        ),
        ("skip", "nonfinite is 'skip'"),
    ],
)
def test_training_of_each_rank_alone_is_refused(results: Results, case: str, message: str) -> None:
    for rank in results[1]:
        assert message in rank["refusals"][case]


def test_ranks_whose_data_end_first_get_empty_batches(results: Results) -> None:
    assert [rank["batches"] for rank in results[1]] == [[3, 16], [3, 24]]


def test_values_that_are_assigned_outside_run_are_compared(results: Results) -> None:
    for values, message in (rank["assignments"] for rank in results[1]):
        assert values == [3.5, 5.5]
        assert message.startswith("CollectiveMismatchError: the ranks assign different values")
        assert "rank 1: variable 'Variable:0'" in message
