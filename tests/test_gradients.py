"""Gradients that are not plain, and data that are uneven: as one worker on the whole batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from ranks import Rank, Ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(180)]


class Training:
    """Trains from scratch, one directory for each run.

    Args:
      directory: where all of them go.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.ranks: list[Rank] = []

    def variables(self, size: int, **chosen: Any) -> list[dict[str, np.ndarray]]:
        """Final variables of each rank, by name."""
        directory = self._directory / str(len(list(self._directory.iterdir())))
        directory.mkdir()
        own = chosen.pop("own", None)
        settings = {"dump_dir": str(directory), "model_dir": str(directory / "model")}
        settings = {**settings, "optimizers": ["adam"], "checkpoint_steps": 100, **chosen}
        started = Ranks(directory)
        try:
            self.ranks = started.run("train.py", size, arguments=[json.dumps(settings)], own=own)
        finally:
            started.end()
        self.model_dir = directory / "model" / settings["optimizers"][0]
        name = settings["optimizers"][0]
        return [dict(np.load(directory / f"{name}-{rank}.npz")) for rank in range(size)]


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


def check_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert set(found) == set(wanted)
    for name, expected in wanted.items():
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-10, err_msg=name)


def check_same_bits(ranks: list[dict[str, np.ndarray]]) -> None:
    for other in ranks[1:]:
        for name, expected in ranks[0].items():
            np.testing.assert_array_equal(other[name], expected, err_msg=name)


# -- sparse gradients ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_an_embedding_trains_like_on_one_worker(
    training: Training, size: int, sparse_as_dense: bool
) -> None:
    chosen = {"model": "embedding", "sparse_as_dense": sparse_as_dense, "steps": 15}
    one = training.variables(1, **chosen)[0]
    many = training.variables(size, **chosen)
    check_equal(many[0], one)
    check_same_bits(many)


# -- gradients that are reduced before they are applied --------------------------------------


@pytest.mark.parametrize("model", ["mlp", "embedding"])
def test_clipping_by_the_norm_of_the_reduced_gradients(training: Training, model: str) -> None:
    chosen = {"model": model, "optimizers": ["sgd"], "learning_rate": 0.5, "steps": 10}
    one = training.variables(1, **chosen, clip=0.05)[0]
    many = training.variables(2, **chosen, clip=0.05)
    check_equal(many[0], one)
    check_same_bits(many)
    unclipped = training.variables(1, **chosen)[0]
    assert any(np.abs(unclipped[name] - one[name]).max() > 1e-3 for name in one)


def test_gradients_that_are_none_stay_none(training: Training) -> None:
    # the model "averages" has a variable that the loss does not depend on
    for clip in (0.0, 0.05):
        chosen = {"model": "averages", "steps": 5, "clip": clip}
        one = training.variables(1, **chosen)[0]
        two = training.variables(2, **chosen)[0]
        for name in ("dense/kernel", "unused"):
            np.testing.assert_allclose(two[name], one[name], rtol=0, atol=1e-10, err_msg=name)
        assert not two["unused"].any()


# -- accumulation --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_micro_batches_equal_one_large_batch(training: Training, size: int) -> None:
    lengths = [[4] * 12] * size
    micro = training.variables(size, lengths=lengths, accumulate_steps=3)
    whole = training.variables(1, lengths=lengths, merge=3)[0]
    assert whole["global_step"] == 4
    check_equal(micro[0], whole)
    check_same_bits(micro)


def test_micro_batches_that_make_no_step_are_left_out(training: Training) -> None:
    micro = training.variables(1, lengths=[[4] * 8], accumulate_steps=3)[0]
    whole = training.variables(1, lengths=[[4] * 6], merge=3)[0]
    training.variables(1, lengths=[[4] * 8], accumulate_steps=3)
    assert "ended after 2 of 3 micro-batches" in training.ranks[0].output
    check_equal(micro, whole)


# -- uneven data ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lengths", [[[4, 4, 4, 2], [4, 3]], [[5, 5], [5, 5, 5, 1], []], [[4, 4, 4], [4, 4, 4]]]
)
def test_uneven_data_train_like_all_data_on_one_worker(
    training: Training, lengths: list[list[int]]
) -> None:
    many = training.variables(len(lengths), lengths=lengths)
    steps = [len(each) for each in lengths]
    for rank, mine in zip(training.ranks, steps):
        idle = max(steps) - mine
        wanted = f"ended after {mine} steps" + (f"; it took part in {idle} more" if idle else "")
        assert rank.output.count(wanted) == 1, rank.output
    one = training.variables(1, lengths=lengths)[0]
    assert one["global_step"] == max(steps)
    check_equal(many[0], one)
    check_same_bits(many)


def test_uneven_micro_batches_train_like_all_data_on_one_worker(training: Training) -> None:
    lengths = [[4, 4, 4, 2], [4, 3]]
    many = training.variables(2, lengths=lengths, accumulate_steps=2)
    one = training.variables(1, lengths=lengths, merge=2)[0]
    assert one["global_step"] == 2
    check_equal(many[0], one)


def test_all_ranks_stop_with_the_first_that_has_no_data(training: Training) -> None:
    many = training.variables(2, lengths=[[4] * 5, [4] * 3], uneven_data="stop")
    one = training.variables(1, lengths=[[4] * 3, [4] * 3])[0]
    assert one["global_step"] == 3
    check_equal(many[0], one)
    check_same_bits(many)
    assert "its data has ended after 3 steps" in training.ranks[1].output


# -- variables that each rank changes by itself ----------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_every_checkpoint_holds_what_the_ranks_make_together(
    training: Training, size: int
) -> None:
    chosen = {"model": "averages", "checkpoint_steps": 4}
    training.variables(1, **chosen, steps=10)
    one = training.model_dir
    many = training.variables(size, **chosen, steps=10)
    for step in (4, 8, 10):
        for name in ("moving", "seen"):
            found, wanted = (
                tf.train.load_variable(str(model_dir / f"model.ckpt-{step}"), name)
                for model_dir in (training.model_dir, one)
            )
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12, err_msg=name)
    # each rank has its own, of its part of the data
    assert many[1]["seen"] == 10 * 12 // size
    assert np.abs(many[1]["moving"] - many[0]["moving"]).max() > 1e-3


def test_a_resumed_training_goes_on_with_the_sum_and_the_mean(training: Training) -> None:
    training.variables(1, model="averages", steps=14)
    one = tf.train.load_checkpoint(str(training.model_dir))
    model_dir = str(training.model_dir.parent.parent / "resumed")
    # after 7 steps the data, too, are where they began
    for steps in (7, 14):
        training.variables(2, model="averages", steps=steps, model_dir=model_dir)
    two = tf.train.load_checkpoint(model_dir + "/adam")
    for name in ("moving", "seen"):
        np.testing.assert_allclose(two.get_tensor(name), one.get_tensor(name), rtol=0, atol=1e-12)


# -- agreed stops --------------------------------------------------------------------------


@pytest.mark.parametrize("asking", ["chief", "worker"])
def test_a_rank_that_asks_to_stop_stops_all_after_the_same_step(
    training: Training, asking: str
) -> None:
    index = 0 if asking == "chief" else 1
    own = {f"worker:{index}": [json.dumps({"ask_to_stop_after": 5})]}
    many = training.variables(2, steps=1000, own=own)
    assert [int(each["global_step"]) for each in many] == [6, 6]
    check_same_bits(many)
    assert (training.model_dir / "model.ckpt-6.index").exists()


def test_max_steps_is_met_exactly(training: Training) -> None:
    many = training.variables(2, steps=7)
    assert [int(each["global_step"]) for each in many] == [7, 7]
