"""Numbers of examples in batches, by which ranks decide whether batches need weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from pipelines import data, slices
from rings import Spawn

from estimator_ext._tf_private import variant_tensor
from estimator_ext.pipelines.batch_lengths import UNKNOWN, _number_of, length_of, lengths_of
from estimator_ext.reduction.uneven_data import Needs, needs_of, repeat_last_batch

v1 = tf.compat.v1
CONFIG = v1.ConfigProto()
ROWS = np.zeros([12, 3])

FIXED: dict[str, tuple[Callable[[], Any], int]] = {
    "remainder dropped": (lambda: slices(ROWS).batch(5, drop_remainder=True), 5),
    "repeated first": (lambda: slices(ROWS).repeat().batch(5), 5),
    "divisible": (lambda: slices(ROWS).batch(4).repeat().prefetch(1), 4),
    "last one smaller": (lambda: slices(ROWS).batch(5).repeat(), UNKNOWN),
    "of unknown length": (
        lambda: slices(ROWS).filter(lambda x: x[0] < 1).batch(4).repeat(),
        UNKNOWN,
    ),
    "map": (lambda: slices(ROWS).repeat().batch(4).map(lambda x: x[x[:, 0] > 1]), UNKNOWN),
    "map and batch": (
        lambda: data.range(4).repeat().apply(tf.data.experimental.map_and_batch(lambda x: x, 3)),
        3,
    ),
    "padded": (lambda: data.range(9).map(tf.range).repeat().padded_batch(2), 2),
    "scalars": (lambda: data.range(4), 1),
    "dictionary": (lambda: slices({"x": ROWS, "y": ROWS[:, 0]}).repeat().batch(4), 4),
    "sparse": (
        lambda: slices(tf.sparse.from_dense(ROWS + 1)).repeat().batch(4).prefetch(1),
        4,
    ),
    "ragged": (
        lambda: slices(tf.ragged.constant([[1], [2, 3]])).batch(2).repeat().shuffle(2),
        2,
    ),
    "tensors": (lambda: ({"x": tf.zeros([6, 2])}, tf.zeros([6])), 6),
    "tensors of a queue": (lambda: v1.placeholder(tf.float32, [None, 2]), UNKNOWN),
}


@pytest.mark.parametrize("name", FIXED)
def test_fixed_lengths(name: str) -> None:
    make, length = FIXED[name]
    with tf.Graph().as_default():
        assert lengths_of(make(), CONFIG).batch == length


@pytest.mark.parametrize(
    "make",
    [
        lambda: slices(ROWS),
        lambda: slices(ROWS).repeat(),
        lambda: slices(ROWS).repeat(0),
        lambda: slices(ROWS[:0]).repeat(),
        lambda: slices(ROWS).repeat(3).shuffle(2).batch(5).prefetch(1),
        lambda: slices(ROWS).batch(5, drop_remainder=True).repeat(2),
        lambda: (
            slices({"x": ROWS, "y": ROWS}).map(lambda row: row["x"], 2).cache().batch(5).repeat()
        ),
    ],
)
def test_constants_say_the_number_of_elements(make: Callable[[], Any]) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        dataset = make()
        assert _number_of(variant_tensor(dataset).op) == session.run(dataset.cardinality())


def test_other_data_are_asked_in_a_session() -> None:
    with tf.Graph().as_default():
        for dataset in (
            slices(ROWS).filter(lambda row: row[0] < 1),
            data.range(4),
            slices(ROWS).skip(1),
        ):
            assert _number_of(variant_tensor(dataset.batch(2)).op) is None
        mapped = v1.data.Dataset.from_tensor_slices(ROWS).map(lambda row: row)  # which may end it
        assert _number_of(variant_tensor(mapped.repeat()).op) is None
        fed = slices(ROWS).repeat().repeat(v1.placeholder(tf.int64, []))
        assert _number_of(variant_tensor(fed).op) is None


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        (tf.zeros([5, 2]), 5),
        (tf.zeros([]), 1),
        ({"b": tf.zeros([3]), "c": tf.zeros([])}, 3),
        (tf.sparse.from_dense([[1, 0], [0, 1], [0, 0]]), 3),
        (tf.ragged.constant([[1], [2, 3]]), 2),
    ],
)
def test_lengths_of_batches(batch: Any, length: int) -> None:
    assert int(length_of(batch)) == length


@pytest.mark.parametrize(
    ("make", "needs"),
    [
        (lambda _: data.range(9).repeat().batch(4), Needs(weights=False, join=False)),
        (lambda rank: data.range(9).repeat().batch(4 + rank), Needs(weights=True, join=False)),
        (lambda rank: data.range(9).batch(4 - rank).repeat(), Needs(weights=True, join=False)),
        (lambda rank: data.range(9).repeat(1 - 2 * rank).batch(3), Needs(weights=True, join=True)),
        (lambda _: tf.zeros([3]), Needs(weights=False, join=False)),
        (lambda rank: tf.zeros([3 + rank]), Needs(weights=True, join=False)),
    ],
)
def test_needs_of_the_ranks(spawn_inproc: Spawn, make: Any, needs: Needs) -> None:
    def find(communicator: Any) -> Needs:
        with tf.Graph().as_default():
            return needs_of(make(communicator.rank), communicator, CONFIG)

    assert spawn_inproc(2, find) == [needs, needs]


@pytest.fixture
def v1_shapes() -> Iterator[None]:
    v1.disable_v2_tensorshape()
    yield
    v1.enable_v2_tensorshape()


@pytest.mark.usefixtures("v1_shapes")
def test_a_batch_is_repeated_with_the_shapes_of_tensorflow_1() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        pairs = v1.data.make_one_shot_iterator(repeat_last_batch(slices(ROWS).batch(8)))
        following = pairs.get_next()
        read = [session.run(following) for _ in range(3)]
    assert [(len(batch), bool(new)) for batch, new in read] == [(8, True), (4, True), (4, False)]
