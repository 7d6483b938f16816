"""More of special gradients and uneven data: equal to one worker on full batches."""

from __future__ import annotations

import numpy as np
import pytest
from train_runs import Runs, Trainings, check_equal

EMBEDDING = {"model": "embedding", "steps": 15}
CLIPPED = {"optimizers": ["sgd"], "learning_rate": 0.5, "steps": 10, "clip": 0.05}
NONE = {"model": "averages", "steps": 5}
PARTIAL = [[4, 4, 4, 2], [4, 3]]
LONG = {"lengths": [[4] * 36 + [3], [4] * 49 + [1]], "steps": 60}
ENDLESS = {"lengths": [[4, 4, 3, 4], [4, 2, 1, 4]], "repeated": True}
OF_ALL_SIZES = {
    "embedding": EMBEDDING,
    "clipped mlp": {**CLIPPED, "model": "mlp"},
    "clipped embedding": {**CLIPPED, "model": "embedding"},
    "none": NONE,
    "none, clipped": {**NONE, "clip": 0.05},
    "long": LONG,
    "endless batches": {**ENDLESS, "steps": 10},
}
RUNS: Runs = {
    1: {
        **OF_ALL_SIZES,
        "unclipped mlp": {**CLIPPED, "model": "mlp", "clip": 0.0},
        "large uneven batches": {"lengths": PARTIAL, "merge": 2},
        "endless large batches": {**ENDLESS, "steps": 6, "merge": 2},
    },
    2: {
        **OF_ALL_SIZES,
        "embedding as dense": {**EMBEDDING, "sparse_as_dense": True},
        "embedding in buckets": {**EMBEDDING, "bucket_mb": 128 / 2**20},
        "uneven micro-batches": {"lengths": PARTIAL, "accumulate_steps": 2},
        "endless micro-batches": {**ENDLESS, "steps": 6, "accumulate_steps": 2},
    },
    3: {"embedding in other orders": {**EMBEDDING, "rotated": True}},
}


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("trainings"), RUNS)


@pytest.mark.parametrize(
    ("size", "name", "of_one"),
    [
        (2, "embedding as dense", "embedding"),
        (2, "embedding in buckets", "embedding"),
        (3, "embedding in other orders", "embedding"),
        (2, "clipped embedding", "clipped embedding"),
        (2, "long", "long"),
        (2, "uneven micro-batches", "large uneven batches"),
        (2, "endless batches", "endless batches"),
        (2, "endless micro-batches", "endless large batches"),
    ],
)
def test_ranks_train_as_one_worker(
    trainings: Trainings, size: int, name: str, of_one: str
) -> None:
    check_equal(trainings.variables(size, name), trainings.variables(1, of_one))


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
