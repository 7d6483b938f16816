"""Pipelines that several data workers divide: each element comes once, from real servers.

The reference is the same pipeline in this process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from pipelines import Make, data, slices, ten, values_of, write_files

import hostopt
from estimator_ext.pipelines.divided_pipeline import (
    check_dataset,
    divisible,
    transformations_of,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_shard_is_refused_unless_it_is_all(workers: int) -> None:
    with tf.Graph().as_default():
        check_dataset(data.range(4).shard(1, 0), workers)
        for count in (2, tf.compat.v1.placeholder(tf.int64, [])):
            with pytest.raises(hostopt.ConfigError, match="the other shards would never be read"):
                check_dataset(data.range(4).shard(count, 0), workers)


@pytest.mark.parametrize(
    ("first", "second", "are_same"),
    [
        (lambda: data.range(9), lambda: data.range(9), True),
        (lambda: data.range(9), lambda: data.range(8), False),
        (lambda: data.range(0, 9, 2), lambda: data.range(1, 9, 2), False),
        (lambda: slices(["a", "bc"]), lambda: slices(["bc", "a"]), True),
        (lambda: slices(["a", "bc"]), lambda: slices(["a", "bd"]), False),
        (lambda: slices(np.arange(9.0)), lambda: slices(np.arange(9.0)[::-1]), True),
        (lambda: slices(np.arange(10.0)[::2]), lambda: slices(np.arange(10.0)[1::2]), False),
        (lambda: data.list_files("0/*"), lambda: data.list_files("1/*"), False),
        (lambda: tf.data.TFRecordDataset("0"), lambda: tf.data.TFRecordDataset("1"), False),
        (lambda: slices([1]), lambda: slices([1]).concatenate(slices([2])), False),
    ],
)
def test_ranks_compare_the_sources_of_their_data(first: Any, second: Any, are_same: bool) -> None:
    with tf.Graph().as_default():
        assert (transformations_of(first()) == transformations_of(second())) == are_same


def shard_in_interleave(rank: int) -> Any:
    return data.range(4).interleave(lambda x: ten(x).shard(2, rank))


def filtered(rank: Any) -> Any:
    return data.range(9).map(lambda x: x + 1).filter(lambda x: tf.equal(x % 2, rank)).batch(3)


def augmented(seed: int) -> Any:
    pipeline = (
        data.range(3)
        .flat_map(lambda x: ten(x).shuffle(4, seed=seed))
        .shuffle(4, seed)
        .map(lambda x: x + tf.random.stateless_uniform([], [1, seed], 0, 9, tf.int64))
    )
    return data.sample_from_datasets([pipeline, data.range(3).repeat(2)], seed=seed)


def words(texts: list[str]) -> Any:
    table = tf.constant(texts)
    return data.range(2).map(lambda x: table[x])


@pytest.mark.parametrize(
    ("make", "first", "second", "are_same"),
    [
        (shard_in_interleave, 0, 1, False),
        (shard_in_interleave, 1, 1, True),
        (filtered, 0, 1, False),
        (lambda rank: filtered(tf.constant(rank, tf.int64)), 0, 1, False),
        (lambda rank: filtered(tf.constant(rank, tf.int64)), 1, 1, True),
        (lambda rank: data.range(9).skip(4 * rank).take(4), 0, 1, False),
        (lambda add: data.range(9).map(lambda x: x + 1 if add else x - 1), True, False, False),
        (lambda size: data.range(9).batch(size), 2, 3, False),
        (lambda times: data.range(9).repeat(times), 2, 3, False),
        (augmented, 1, 2, True),
        (words, ["a", "b"], ["b", "a"], True),
        (words, ["a", "b"], ["a", "c"], False),
    ],
)
def test_ranks_compare_the_transformations_of_their_data(
    make: Any, first: Any, second: Any, are_same: bool
) -> None:
    found = []
    for value in (first, second):
        with tf.Graph().as_default():
            data.range(3).map(lambda x: x)  # so that the functions have other names
            if value is second:
                data.range(3).map(lambda x: 2 * x)
            found.append(transformations_of(make(value)))
    assert (found[0] == found[1]) == are_same
    assert len(found[0]) == len(found[1]) > 0


def test_each_transformation_is_described_by_itself() -> None:
    with tf.Graph().as_default():
        before, after = map(transformations_of, map(filtered, (0, 1)))
    differing = [name for name in before if before[name] != after[name]]
    assert len(before) == 4
    (name,) = differing
    assert before[name].startswith("FilterDataset of ")
    assert before[name].endswith(" with constants: 2, 0")
    assert after[name].endswith(" with constants: 2, 1")


def test_the_order_of_an_interleave_that_is_replaced(directory: Path) -> None:
    def make() -> Any:
        pipeline = data.range(4).repeat(2).interleave(ten, cycle_length=3, block_length=2)
        return pipeline.batch(100)

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        iterator = tf.compat.v1.data.make_one_shot_iterator(divisible(make()))
        operations = {op.type for op in tf.compat.v1.get_default_graph().get_operations()}
        (batch,) = [session.run(iterator.get_next())]
    assert "ParallelInterleaveDatasetV4" in operations
    assert batch.tolist() == values_of(make())


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("refusal", "make"),
    [
        (
            "uses CSVDatasetV2 ",
            lambda path: tf.data.experimental.CsvDataset([str(path / "0.txt")], [tf.int64]),
        ),
        (
            r"joins 2 datasets with zip\(\)",
            lambda path: data.range(3).snapshot(str(path / "saved")),
        ),
        (
            "uses (Experimental)?GroupByReducerDataset ",
            lambda _: data.range(9).apply(
                tf.data.experimental.group_by_reducer(
                    lambda x: x % 3,
                    tf.data.experimental.Reducer(
                        lambda _: 0, lambda old, _: old + 1, lambda old: old
                    ),
                )
            ),
        ),
    ],
)
def test_a_transformation_that_is_not_known_is_refused(
    directory: Path, refusal: str, make: Make, workers: int
) -> None:
    wanted = f"the dataset of input_fn {refusal}"
    with tf.Graph().as_default(), pytest.raises(hostopt.ConfigError, match=wanted):
        check_dataset(make(directory), workers)
