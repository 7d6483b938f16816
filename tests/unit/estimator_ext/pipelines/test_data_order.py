"""The order of the ranks' data is compared before shards are taken by position."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from pipelines import data, lines, slices, ten, texts, values_of, write_files
from rings import Spawn

import hostopt
from estimator_ext.pipelines.data_order import OrderCheck, PeekedGenerator

v1 = tf.compat.v1
Make = Callable[[int], Any]  # of a rank
NUMBERS = np.arange(64)


def elements(dataset: Any, count: int = 1000) -> list[Any]:
    """Reads a dataset in a session, or eagerly."""
    if tf.executing_eagerly():
        return values_of(dataset.take(count))
    following = v1.data.make_one_shot_iterator(dataset.take(count)).get_next()
    found: list[Any] = []
    with v1.Session() as session:
        while True:
            try:
                found += np.ravel(session.run(following)).tolist()
            except tf.errors.OutOfRangeError:
                return found


def in_graph(make: Make, rank: int) -> Any:
    v1.set_random_seed(5)  # which the ranks agree on
    return make(rank)


def outcomes(spawn: Spawn, make: Make, *, eagerly: bool = False, read: bool = True) -> list[Any]:
    """Returns of each of two ranks the elements after the check, or the words of the refusal."""

    def check(communicator: hostopt.Communicator) -> Any:
        order = OrderCheck(communicator.duplicate("order"), "Remedy")
        try:
            if eagerly:
                dataset, _ = order.in_one_order(make(communicator.rank))
                return elements(dataset) if read else None
            with tf.Graph().as_default():
                dataset, _ = order.in_one_order(in_graph(make, communicator.rank))
                return elements(dataset) if read else None
        except hostopt.ConfigError as error:
            return str(error)

    return spawn(2, check)


def refused(spawn: Spawn, make: Make, text: str, *, eagerly: bool = False) -> None:
    for words in outcomes(spawn, make, eagerly=eagerly):
        assert text in words
        assert words.count(". ") == 1  # two sentences


def of_rank(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).permutation(NUMBERS)


def seeded_below(rank: int) -> Any:
    """Chooses elements by random numbers."""
    v1.set_random_seed(5 + rank)
    return data.range(64).filter(lambda _: tf.random.uniform([]) < 0.5)


OTHER_ORDERS: dict[str, tuple[Make, str]] = {
    "slices": (lambda rank: slices(of_rank(rank)).batch(4), "element 0 of TensorSlice is not"),
    "structures": (
        lambda rank: slices({"x": (NUMBERS, of_rank(rank))}).batch(4),
        "element 0 of TensorSlice is not",
    ),
    "strings": (lambda rank: slices(of_rank(rank).astype(str)), "element 0 of TensorSlice is not"),
    "sparse": (
        lambda rank: slices(tf.sparse.from_dense(of_rank(rank)[:, None])),
        "element 0 of TensorSlice is not",
    ),
    "ragged": (
        lambda rank: slices(tf.ragged.constant([[n] * 3 for n in of_rank(rank)])),
        "element 0 of TensorSlice is not",
    ),
    "later": (lambda rank: slices([1, 2, rank]), "element 2 of TensorSlice is not"),
    "fewer": (lambda rank: slices(range(3 - rank)), "element 2 of TensorSlice is not"),
    "zipped": (
        lambda rank: data.zip((data.range(64), slices(of_rank(rank)))),
        "element 0 of TensorSlice is not",
    ),
    "shuffle": (lambda rank: data.range(64).shuffle(64, seed=rank), "'Shuffle 0: seed2'"),
    "take": (lambda rank: data.range(64).repeat().take(9 + rank), "'Take 0: count'"),
    "filter": (lambda rank: data.range(64).filter(lambda x: x > rank), "of Filter is not"),
    "random filter": (seeded_below, "of Filter is not"),
    "transformations": (
        lambda rank: data.range(64).batch(2) if rank else data.range(64).skip(2),
        "the dataset has 'Batch 0: batch_size' where rank 0 has 'Skip 0: count'",
    ),
    "parallel functions": (
        lambda _: data.range(4).flat_map(
            lambda x: data.range(x).map(lambda x: x, num_parallel_calls=2, deterministic=False)
        ),
        "a function of a dataset has deterministic=False (ParallelMapDatasetV2)",
    ),
}


@pytest.mark.parametrize("name", OTHER_ORDERS)
def test_other_orders_are_refused(spawn_inproc: Spawn, name: str) -> None:
    make, text = OTHER_ORDERS[name]
    refused(spawn_inproc, make, text)


def slowly(x: Any) -> Any:
    """Passes on a number after a time that differs between calls."""

    def wait(x: Any) -> Any:
        time.sleep(np.random.default_rng().random() / 200)
        return x

    return tf.ensure_shape(tf.numpy_function(wait, [x], tf.int64), [])


def noisy(x: Any) -> Any:
    return tf.cast(x, tf.float32) + tf.random.uniform([])


SAME_ORDERS: dict[str, Make] = {
    "files in other directories": lambda rank: slices([f"/{rank}/{name}" for name in "abc"]).map(
        tf.strings.length
    ),
    "unbatched noise": lambda rank: (
        data.range(8)
        .batch(4, drop_remainder=True)
        .map(lambda x: (x, tf.random.uniform([4], seed=rank)))
        .unbatch()
        .map(lambda x, _: x)
    ),
    "files": lambda _: texts(Path(FILES)).interleave(lines, num_parallel_calls=2).shuffle(9),
    "endless": lambda _: data.range(64).shuffle(64).repeat().batch(4).take(40),
    "empty": lambda _: data.range(0),
    "unequal lengths": lambda _: data.range(9).map(tf.range).padded_batch(2),
    "interleave": lambda _: data.range(4).interleave(
        lambda x: ten(x).map(slowly), 4, num_parallel_calls=4, deterministic=False
    ),
    "map": lambda _: data.range(64).map(slowly, num_parallel_calls=4, deterministic=False),
    "options": lambda _: data.range(64).map(slowly, num_parallel_calls=4).with_options(SLOPPY),
    "random choice": lambda _: (
        data.range(64).map(noisy, num_parallel_calls=4).filter(lambda x: x % 1 < 0.5)
    ),
}
SLOPPY = tf.data.Options()
SLOPPY.deterministic = False
FILES = ""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "FILES", str(write_files(tmp_path)))


@pytest.mark.parametrize("name", SAME_ORDERS)
def test_one_order_is_kept_or_made(spawn_inproc: Spawn, name: str) -> None:
    one, other = outcomes(spawn_inproc, SAME_ORDERS[name])
    assert one == other
    assert isinstance(one, list)


@pytest.mark.parametrize("name", ["files", "endless", "empty", "unequal lengths"])
def test_the_elements_are_those_without_a_check(spawn_inproc: Spawn, name: str) -> None:
    make = SAME_ORDERS[name]
    with tf.Graph().as_default():
        expected = elements(in_graph(make, 0))
    assert outcomes(spawn_inproc, make) == [expected] * 2


def test_noise_in_parallel_does_not_count_if_positions_stay(spawn_inproc: Spawn) -> None:
    def make(rank: int) -> Any:
        v1.set_random_seed(rank)
        return data.range(64).map(noisy, num_parallel_calls=4).batch(4)

    for found in outcomes(spawn_inproc, make):
        assert np.floor(found).tolist() == NUMBERS.tolist()


def test_slow_data_are_read_for_a_moment_only(spawn_inproc: Spawn) -> None:
    calls = []

    def count(x: Any) -> Any:
        calls.append(x)
        time.sleep(0.3)  # longer than the limit
        return x

    def make(_: int) -> Any:
        counted = data.range(64).map(lambda x: tf.numpy_function(count, [x], tf.int64))
        return counted.filter(lambda x: x >= 0).repeat()

    assert outcomes(spawn_inproc, make, read=False) == [None] * 2
    assert len(calls) <= 4  # each rank reads one element, and TensorFlow another in advance


# -- generators ----------------------------------------------------------------------------


class Generators:
    """A generator for each rank.

    Args:
      order: numbers of a rank.
    """

    def __init__(self, order: Callable[[int], Any]) -> None:
        self._order = order
        self.calls = [0, 0]

    def __call__(self, rank: int) -> Any:
        def generate() -> Any:
            self.calls[rank] += 1
            for each in self._order(rank):
                yield np.full(2, each), b"text"

        signature = (tf.TensorSpec([2], tf.int64), tf.TensorSpec([], tf.string))
        pipeline = data.from_generator(generate, output_signature=signature)
        return pipeline.map(lambda x, _: x).unbatch().batch(3)


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_generator_is_called_once_and_loses_nothing(spawn_inproc: Spawn, eagerly: bool) -> None:
    generators = Generators(lambda rank: range(200))
    found = outcomes(spawn_inproc, generators, eagerly=eagerly)
    assert found == [np.repeat(np.arange(200), 2).tolist()] * 2
    assert generators.calls == [1, 1]


@pytest.mark.parametrize("eagerly", [False, True])
def test_generators_of_other_orders_are_refused(spawn_inproc: Spawn, eagerly: bool) -> None:
    errors = []

    def check(communicator: hostopt.Communicator) -> None:
        order = OrderCheck(communicator.duplicate("order"), "Remedy")
        make = Generators(of_rank)
        try:
            if eagerly:
                elements(order.in_one_order(make(communicator.rank))[0])
            else:
                with tf.Graph().as_default():
                    elements(order.in_one_order(make(communicator.rank))[0])
        except tf.errors.OpError:
            errors.append(communicator.transport.error)

    spawn_inproc(2, check)
    for error in errors:
        assert isinstance(error, hostopt.ConfigError)
        assert "element 0 of from_generator() is not that of rank 0. Remedy" in str(error)
    assert len(errors) == 2


def test_an_array_may_be_used_for_each_element() -> None:
    def generate() -> Any:
        array = np.zeros(2)
        for each in range(100):
            array[:] = each
            yield {"x": array}

    found: list[int] = []
    peeked = PeekedGenerator(generate)
    peeked.compare_next(found.extend)
    assert [each["x"][0] for each in peeked()] == list(range(100))
    assert len({*found}) == 64
    assert [each["x"][1] for each in peeked()] == list(range(100))  # is not compared again
    assert len(found) == 64


# -- eagerly -------------------------------------------------------------------------------

EAGERLY: dict[str, tuple[Make, str]] = {
    "slices": (lambda rank: slices(of_rank(rank)), "element 0 of TensorSlice is not"),
    "shuffle of slices": (
        lambda rank: slices(of_rank(rank)).shuffle(9, seed=1).filter(lambda x: x > 3),
        "element 0 of TensorSlice is not",
    ),
    "no seed": (lambda _: data.range(64).shuffle(64).batch(4), "a dataset has no seed (Shuffle)"),
    "interleave": (
        lambda _: data.range(4).interleave(ten, num_parallel_calls=2, deterministic=False),
        "a dataset has deterministic=False (ParallelInterleave)",
    ),
    "map": (
        lambda _: data.range(4).map(lambda x: x, num_parallel_calls=2, deterministic=False),
        "a dataset has deterministic=False (ParallelMap)",
    ),
    "random choice": (
        lambda _: data.range(64).map(noisy).filter(lambda x: x % 1 < 0.5),
        "a dataset has no seed (RandomUniform)",
    ),
    "shards": (lambda rank: data.range(64).shard(2, rank), "'Shard 0: index'"),
}


@pytest.fixture
def no_seed() -> None:
    tf.random.set_seed(None)


@pytest.mark.usefixtures("no_seed")
@pytest.mark.parametrize("name", EAGERLY)
def test_other_orders_are_refused_eagerly(spawn_inproc: Spawn, name: str) -> None:
    make, text = EAGERLY[name]
    refused(spawn_inproc, make, text, eagerly=True)


@pytest.mark.usefixtures("no_seed")
def test_no_epoch_of_a_shuffle_is_consumed(spawn_inproc: Spawn) -> None:
    def make(_: int) -> Any:
        return data.range(9).shuffle(9, seed=3).flat_map(ten)

    assert outcomes(spawn_inproc, make, eagerly=True) == [values_of(make(0))] * 2
