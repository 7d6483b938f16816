"""Special gradients and uneven data: equal to one worker on full batches (more at night)."""

from __future__ import annotations

import numpy as np
import pytest
from train_runs import Runs, Trainings, check_equal

EMBEDDING = {"model": "embedding", "steps": 15}
CLIPPED = {"optimizers": ["sgd"], "learning_rate": 0.5, "steps": 10, "clip": 0.05}
SCALED = {"loss_scale": True, "steps": 12}
EVEN = [[4] * 12] * 2
UNEVEN = {
    "partial": [[4, 4, 4, 2], [4, 3]],
    "a rank without data": [[5, 5], [5, 5, 5, 1], []],
    "even": [[4, 4, 4], [4, 4, 4]],
}
# Trainings by number of ranks and name; one process of each rank runs them in turn.
RUNS: Runs = {
    1: {
        "embedding": EMBEDDING,
        "clipped mlp": {**CLIPPED, "model": "mlp"},
        "scaled loss": SCALED,
        "micro-batches": {"lengths": EVEN[:1], "accumulate_steps": 3},
        "large batches of one": {"lengths": EVEN[:1], "merge": 3},
        "large batches of two": {"lengths": EVEN, "merge": 3},
        "micro-batches left over": {"lengths": [[4] * 8], "accumulate_steps": 3},
        "large batches, none left over": {"lengths": [[4] * 6], "merge": 3},
        "three batches": {"lengths": [[4] * 3, [4] * 3]},
        **{name: {"lengths": lengths, "steps": 60} for name, lengths in UNEVEN.items()},
    },
    2: {
        "embedding": EMBEDDING,
        "clipped mlp": {**CLIPPED, "model": "mlp"},
        "scaled loss": SCALED,
        "micro-batches": {"lengths": EVEN, "accumulate_steps": 3},
        "stop": {"lengths": [[4] * 5, [4] * 3], "uneven_data": "stop"},
        **{name: {"lengths": UNEVEN[name], "steps": 60} for name in ("partial", "even")},
    },
    3: {
        "embedding": EMBEDDING,
        "a rank without data": {"lengths": UNEVEN["a rank without data"]},
    },
}


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("trainings"), RUNS)


# -- sparse gradients ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_an_embedding_trains_as_on_one_worker(trainings: Trainings, size: int) -> None:
    check_equal(trainings.variables(size, "embedding"), trainings.variables(1, "embedding"))


# -- gradients that are reduced before they are applied --------------------------------------


def test_clipping_by_the_norm_of_the_reduced_gradients(trainings: Trainings) -> None:
    check_equal(trainings.variables(2, "clipped mlp"), trainings.variables(1, "clipped mlp"))


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


def test_all_ranks_stop_with_the_first_rank_without_data(trainings: Trainings) -> None:
    one = trainings.variables(1, "three batches")
    assert one[0]["global_step"] == 3
    check_equal(trainings.variables(2, "stop"), one)
    assert trainings.log_counts(2, "its data has ended after 3 steps") == [0, 1]
