"""Special gradients, uneven data and coordinated stops: equal to one worker on full batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from programs import train
from ranks import Ranks

EMBEDDING = {"model": "embedding", "steps": 15}
CLIPPED = {"optimizers": ["sgd"], "learning_rate": 0.5, "steps": 10, "clip": 0.05}
AVERAGES = {"model": "averages", "checkpoint_steps": 4, "steps": 10}
SCALED = {"loss_scale": True, "steps": 12}
NONE = {"model": "averages", "steps": 5}
EVEN = [[4] * 12] * 2
UNEVEN = {
    "partial": [[4, 4, 4, 2], [4, 3]],
    "a rank without data": [[5, 5], [5, 5, 5, 1], []],
    "even": [[4, 4, 4], [4, 4, 4]],
    "long": [[4] * 36 + [3], [4] * 49 + [1]],
}
ENDLESS = {"lengths": [[4, 4, 3, 4], [4, 2, 1, 4]], "repeated": True}
# Trainings by number of ranks and name; one process of each rank runs them in turn.
RUNS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "embedding": EMBEDDING,
        "clipped mlp": {**CLIPPED, "model": "mlp"},
        "clipped embedding": {**CLIPPED, "model": "embedding"},
        "unclipped mlp": {**CLIPPED, "model": "mlp", "clip": 0.0},
        "scaled loss": SCALED,
        "none": NONE,
        "none, clipped": {**NONE, "clip": 0.05},
        "micro-batches": {"lengths": EVEN[:1], "accumulate_steps": 3},
        "large batches of one": {"lengths": EVEN[:1], "merge": 3},
        "large batches of two": {"lengths": EVEN, "merge": 3},
        "micro-batches left over": {"lengths": [[4] * 8], "accumulate_steps": 3},
        "large batches, none left over": {"lengths": [[4] * 6], "merge": 3},
        "large uneven batches": {"lengths": UNEVEN["partial"], "merge": 2},
        "endless batches": {**ENDLESS, "steps": 10},
        "endless large batches": {**ENDLESS, "steps": 6, "merge": 2},
        "three batches": {"lengths": [[4] * 3, [4] * 3]},
        "averages": AVERAGES,
        "variables": {"model": "variables"},
        "averages, 14 steps": {**AVERAGES, "steps": 14},
        **{name: {"lengths": lengths, "steps": 60} for name, lengths in UNEVEN.items()},
    },
    2: {
        "embedding": EMBEDDING,
        "embedding as dense": {**EMBEDDING, "sparse_as_dense": True},
        "clipped mlp": {**CLIPPED, "model": "mlp"},
        "clipped embedding": {**CLIPPED, "model": "embedding"},
        "scaled loss": SCALED,
        "none": NONE,
        "none, clipped": {**NONE, "clip": 0.05},
        "micro-batches": {"lengths": EVEN, "accumulate_steps": 3},
        "uneven micro-batches": {"lengths": UNEVEN["partial"], "accumulate_steps": 2},
        "endless batches": {**ENDLESS, "steps": 10},
        "endless micro-batches": {**ENDLESS, "steps": 6, "accumulate_steps": 2},
        "stop": {"lengths": [[4] * 5, [4] * 3], "uneven_data": "stop"},
        "embedding in buckets": {**EMBEDDING, "bucket_mb": 128 / 2**20},
        "batch_norm, data that end": {"model": "batch_norm", "batches": 6, "steps": 60},
        "averages": AVERAGES,
        # the data repeat after 7 steps
        "averages, 7 steps": {**AVERAGES, "steps": 7, "model_dir": "resumed"},
        "averages, resumed": {**AVERAGES, "steps": 14, "model_dir": "resumed"},
        "batch_norm": {"model": "batch_norm", "checkpoint_steps": 5, "summary_steps": 1},
        "variables": {"model": "variables"},
        "early stopping": {"steps": 1000, "early_stopping": True},
        "rank 0 asks": {"steps": 1000, "asking": 0},
        "rank 1 asks": {"steps": 1000, "asking": 1},
        "max_steps": {"steps": 7},
        **{name: {"lengths": UNEVEN[name], "steps": 60} for name in ("partial", "even", "long")},
    },
    3: {
        "embedding": EMBEDDING,
        "embedding in other orders": {**EMBEDDING, "rotated": True},
        "averages": AVERAGES,
        "a rank without data": {"lengths": UNEVEN["a rank without data"]},
    },
}


class Trainings:
    """Trains all models.

    Args:
      directory: directory of variables, checkpoints and output.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._outputs: dict[int, list[str]] = {}
        for size, runs in RUNS.items():
            settings = []
            for name, chosen in runs.items():
                dump_dir = self._dump_dir(size, name)
                dump_dir.mkdir(parents=True)
                model_dir = str(directory / str(size) / chosen.get("model_dir", name) / "model")
                settings.append({**chosen, "dump_dir": str(dump_dir), "model_dir": model_dir})
            common = {"optimizers": ["adam"], "checkpoint_steps": 100, "runs": settings}
            with Ranks(directory / str(size)) as ranks:
                started = ranks.run("train.py", size, arguments=[json.dumps(common)])
            self._outputs[size] = [rank.output for rank in started]

    def _dump_dir(self, size: int, name: str) -> Path:
        return self._directory / str(size) / name

    def variables(self, size: int, name: str) -> list[dict[str, np.ndarray]]:
        """Returns the final variables and the losses of each rank, by name."""
        dump_dir = self._dump_dir(size, name)
        return [dict(np.load(*dump_dir.glob(f"*-{rank}.npz"))) for rank in range(size)]

    def checkpoint(self, size: int, name: str, step: int) -> Any:
        """Returns the checkpoint of rank 0 after a step."""
        model_dir = self._directory / str(size) / RUNS[size][name].get("model_dir", name)
        return tf.train.load_checkpoint(str(model_dir / "model" / "adam" / f"model.ckpt-{step}"))

    def log_counts(self, size: int, text: str) -> list[int]:
        """Counts how often each rank has logged a text, in all of its runs."""
        return [output.count(text) for output in self._outputs[size]]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("trainings"))


def check_equal(many: list[dict[str, np.ndarray]], one: list[dict[str, np.ndarray]]) -> None:
    """Checks that many workers equal one, and that all of them hold the same bits."""
    for result in many:
        assert set(result) == set(one[0])
        for name, expected in one[0].items():
            np.testing.assert_allclose(result[name], expected, rtol=0, atol=1e-10, err_msg=name)
            np.testing.assert_array_equal(result[name], many[0][name], err_msg=name)


# -- sparse gradients ----------------------------------------------------------------------


def test_sparse_gradients_and_several_buckets(trainings: Trainings) -> None:
    result = trainings.variables(2, "embedding in buckets")
    check_equal(result, trainings.variables(1, "embedding"))


@pytest.mark.parametrize(
    ("name", "size"), [("embedding", 2), ("embedding", 3), ("embedding as dense", 2)]
)
def test_an_embedding_trains_as_on_one_worker(trainings: Trainings, name: str, size: int) -> None:
    check_equal(trainings.variables(size, name), trainings.variables(1, "embedding"))


def test_ranks_may_pass_their_gradients_in_different_orders(trainings: Trainings) -> None:
    result = trainings.variables(3, "embedding in other orders")
    check_equal(result, trainings.variables(1, "embedding"))


# -- gradients that are reduced before they are applied --------------------------------------


@pytest.mark.parametrize("model", ["mlp", "embedding"])
def test_clipping_by_the_norm_of_the_reduced_gradients(trainings: Trainings, model: str) -> None:
    name = f"clipped {model}"
    check_equal(trainings.variables(2, name), trainings.variables(1, name))


def test_clipping_changes_the_result(trainings: Trainings) -> None:
    clipped = trainings.variables(1, "clipped mlp")[0]
    unclipped = trainings.variables(1, "unclipped mlp")[0]
    assert any(np.abs(unclipped[name] - clipped[name]).max() > 1e-3 for name in clipped)


@pytest.mark.parametrize("name", ["none", "none, clipped"])
def test_gradients_that_are_none_stay_none(trainings: Trainings, name: str) -> None:
    # the loss does not depend on one of the variables
    one, two = trainings.variables(1, name)[0], trainings.variables(2, name)[0]
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=0, atol=1e-10)
    assert not two["unused"].any()


def test_a_step_that_overflows_on_one_rank_is_skipped_by_all(trainings: Trainings) -> None:
    one, two = trainings.variables(1, "scaled loss"), trainings.variables(2, "scaled loss")
    for ranks in (one, two):
        for result in ranks:
            del result["losses"]  # one of them is infinite
    check_equal(two, one)
    # 11 steps update the moments: Adam's power of beta says so
    np.testing.assert_allclose(two[0]["beta1_power"], 0.9**12, rtol=1e-6)
    # 1024, halved by the third step, doubled by the seventh and the eleventh
    assert two[0]["loss_scale"] == 2048
    assert two[0]["good_steps"] == 1


# -- accumulation --------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "whole"), [(1, "of one"), (2, "of two")])
def test_micro_batches_equal_one_large_batch(trainings: Trainings, size: int, whole: str) -> None:
    one = trainings.variables(1, f"large batches {whole}")
    assert one[0]["global_step"] == 4
    check_equal(trainings.variables(size, "micro-batches"), one)


def test_incomplete_micro_batches_are_skipped(trainings: Trainings) -> None:
    micro = trainings.variables(1, "micro-batches left over")
    check_equal(micro, trainings.variables(1, "large batches, none left over"))
    assert trainings.log_counts(1, "ended after 2 of 3 micro-batches") == [1]


# -- uneven data ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_data_train_as_all_data_on_one_worker(trainings: Trainings, name: str) -> None:
    lengths = UNEVEN[name]
    one = trainings.variables(1, name)
    assert one[0]["global_step"] == max(len(each) for each in lengths)
    check_equal(trainings.variables(len(lengths), name), one)


def test_each_rank_logs_the_end_of_its_data_once(trainings: Trainings) -> None:
    part = "its data ended after {} steps; it took part in {} more with weight zero"
    assert trainings.log_counts(2, part.format(2, 2)) == [0, 1]
    assert trainings.log_counts(3, part.format(2, 2)) == [1, 0, 0]
    assert trainings.log_counts(3, part.format(0, 4)) == [0, 0, 1]
    assert trainings.log_counts(3, "its data ended after 4 steps, the last") == [0, 1, 0]


def test_uneven_micro_batches_train_as_all_data_on_one_worker(trainings: Trainings) -> None:
    one = trainings.variables(1, "large uneven batches")
    assert one[0]["global_step"] == 2
    check_equal(trainings.variables(2, "uneven micro-batches"), one)


@pytest.mark.parametrize(
    ("name", "of_one"),
    [
        ("endless batches", "endless batches"),
        ("endless micro-batches", "endless large batches"),
    ],
)
def test_endless_batches_of_different_lengths_train_as_on_one_worker(
    trainings: Trainings, name: str, of_one: str
) -> None:
    check_equal(trainings.variables(2, name), trainings.variables(1, of_one))


def test_all_ranks_stop_with_the_first_rank_without_data(trainings: Trainings) -> None:
    one = trainings.variables(1, "three batches")
    assert one[0]["global_step"] == 3
    check_equal(trainings.variables(2, "stop"), one)
    assert trainings.log_counts(2, "its data has ended after 3 steps") == [0, 1]


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
