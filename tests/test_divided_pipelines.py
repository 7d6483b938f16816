"""Pipelines that several data workers divide: each element comes once, from real servers.

The reference is the same pipeline in this process.
"""

from __future__ import annotations

import collections
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from ranks import Ranks

import hostopt
from estimator_ext.divided_pipeline import divisible, sources_of
from estimator_ext.served_pipeline import check_dataset, transformations_of

pytestmark = [pytest.mark.tensorflow]

FILES, LINES = 4, 10
Make = Callable[[Path], Any]
service = tf.data.experimental.service
data = tf.data.Dataset


class Servers:
    """A dispatcher and data workers in another process, as to stop them takes minutes.

    Args:
      size: number of data workers.
      target: address of the dispatcher.
    """

    def __init__(self, size: int, target: str) -> None:
        self.size = size
        self.target = target

    def register(self, make: Callable[[], Any], name: str) -> Any:
        """Checks and registers a pipeline of a graph, as rank 0 does; returns its elements."""
        with tf.Graph().as_default():
            pipeline = make()
            check_dataset(pipeline, self.size)
            spec = pipeline.element_spec
            registered = service.register_dataset(
                self.target, divisible(pipeline), compression=None, dataset_id=name
            )
            with tf.compat.v1.Session() as session:
                session.run(registered)
        return spec

    def elements(self, make: Callable[[], Any]) -> list[Any]:
        """Returns the elements that two readers get, in any order."""
        name = secrets.token_hex(8)
        spec = self.register(make, name)
        results: list[Any] = []

        def read() -> None:
            prepared = service.from_dataset_id(
                "distributed_epoch", self.target, name, spec, job_name=name
            )
            results.extend(values_of(prepared))

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return results


def values_of(pipeline: Any) -> list[Any]:
    return [value for element in pipeline for value in np.ravel(element.numpy()).tolist()]


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    yield from served_by(1, tmp_path_factory)


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    yield from served_by(2, tmp_path_factory)


def served_by(size: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    ranks = Ranks(tmp_path_factory.mktemp("servers"))
    try:
        (process,) = ranks.start("data_servers.py", {"data": ["unused"]}, arguments=[str(size)])
        process.wait_for_output("serves at ")
        yield Servers(size, process.output.rpartition("serves at ")[2].split()[0])
    finally:
        ranks.end()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files")
    for index in range(FILES):
        lines = [f"{LINES * index + line:02d}" for line in range(LINES)]
        path.joinpath(f"{index}.txt").write_text("".join(f"{line}\n" for line in lines))
        with tf.io.TFRecordWriter(str(path / f"{index}.tfrecord")) as writer:
            for line in lines:
                writer.write(line.encode())
    return path


def slices(values: Any) -> Any:
    return data.from_tensor_slices(values)


def number(text: Any) -> Any:
    return tf.strings.to_number(text, tf.int64)


def texts(path: Path) -> Any:
    return data.list_files(f"{path}/*.txt")


def records(path: Path, **options: Any) -> Any:
    files = sorted(map(str, path.glob("*.tfrecord")))
    return tf.data.TFRecordDataset(files, **options).map(number)


def lines(name: Any) -> Any:
    return tf.data.TextLineDataset(name).map(number)


def ten(x: Any) -> Any:
    return data.range(10 * x, 10 * x + 10)


def interleave_from(start: Any) -> Any:
    return data.range(4).repeat(2).interleave(lambda x: ten(x + start))


def grouped(numbers: Any) -> Any:
    return numbers.group_by_window(lambda x: x % 3, lambda _, part: part.batch(4), 4).unbatch()


def by_length(numbers: Any) -> Any:
    return numbers.bucket_by_sequence_length(
        lambda x: tf.cast(x % 7, tf.int32), [3, 5], [4, 4, 4]
    ).unbatch()


PIPELINES: dict[str, Make] = {
    # files
    "list_files, interleave": lambda path: texts(path).interleave(lines),
    "list_files, repeat, interleave": lambda path: texts(path).repeat(2).interleave(lines),
    "list_files, parallel interleave": lambda path: texts(path).interleave(
        lines, num_parallel_calls=2, deterministic=False
    ),
    "list_files, flat_map": lambda path: texts(path).flat_map(lines),
    "list_files, contrib's interleave": lambda path: texts(path).apply(
        tf.data.experimental.parallel_interleave(lines, 2)
    ),
    "records": records,
    "records in parallel": lambda path: records(path, num_parallel_reads=2),
    "records, shuffled and repeated": lambda path: records(path).shuffle(8).repeat(3).batch(4),
    "records of one length": lambda path: tf.data.FixedLengthRecordDataset(
        sorted(map(str, path.glob("*.txt"))), 3
    ).map(lambda text: number(tf.strings.substr(text, 0, 2))),
    # what reads its input as a nested dataset, after what opens its own input late
    "shuffle, interleave": lambda _: data.range(4).shuffle(4).interleave(ten, cycle_length=2),
    "shuffle, map, interleave": lambda _: (
        data.range(4).shuffle(4).map(lambda x: x).interleave(ten).prefetch(1)
    ),
    "shuffle, interleave, repeat": lambda _: data.range(4).shuffle(4).interleave(ten).repeat(2),
    "interleave with a captured value": lambda _: interleave_from(tf.constant(3, tf.int64)),
    "interleave twice": lambda _: data.range(4).repeat(2).interleave(ten).interleave(ten),
    "nested shuffle, interleave": lambda _: data.range(4).flat_map(
        lambda x: data.range(3).shuffle(3).interleave(ten)
    ),
    "group_by_window, shuffle": lambda _: grouped(data.range(40)).shuffle(4).repeat(2),
    "by length, shuffle": lambda _: by_length(data.range(40)).shuffle(4),
    # sources
    "slices": lambda _: data.from_tensor_slices(np.arange(40)),
    "tensors": lambda _: data.from_tensors(np.arange(40)).unbatch(),
    "sparse slices": lambda _: data.from_tensor_slices(
        tf.sparse.from_dense(tf.reshape(tf.range(1, 41), [40, 1]))
    ).map(tf.sparse.to_dense),
    "concatenate": lambda _: data.range(30).shuffle(4).concatenate(data.range(90, 99)).repeat(2),
    "sample": lambda _: data.sample_from_datasets([data.range(40), data.range(40, 60)], seed=1),
    # elements
    "map": lambda _: data.range(40).map(lambda x: x + 1, num_parallel_calls=2),
    "filter": lambda _: data.range(40).repeat(2).filter(lambda x: x % 3 > 0),
    "errors": lambda _: data.range(40).map(lambda x: 100 // (x % 5)).ignore_errors(),
    "batch": lambda _: data.range(40).batch(3, num_parallel_calls=2),
    "padded_batch": lambda _: data.range(40).map(lambda x: x[None]).padded_batch(3),
    "rebatch": lambda _: data.range(40).batch(4).rebatch(3),
    "map_and_batch": lambda _: data.range(40).apply(
        tf.data.experimental.map_and_batch(lambda x: x, 3)
    ),
    "shuffle_and_repeat": lambda _: data.range(40).apply(
        tf.data.experimental.shuffle_and_repeat(8, 2)
    ),
    "options": lambda _: data.range(40).with_options(tf.data.Options()).prefetch(2),
    "zip of one": lambda _: data.zip((data.range(40),)).map(lambda x: x),
}
COUNTING: dict[str, Make] = {
    "take": lambda _: data.range(40).take(9).repeat(2),
    "skip": lambda _: data.range(40).skip(9).repeat(2),
    "window": lambda _: data.range(40).window(3).flat_map(lambda part: part.batch(3)),
    "scan": lambda _: data.range(40).scan(np.int64(0), lambda old, x: (old + x, old)),
    "take_while": lambda _: data.range(40).take_while(lambda x: x < 9),
    "unique": lambda _: data.range(40).map(lambda x: x // 2).unique(),
    "assert_cardinality": lambda _: data.range(40).apply(
        tf.data.experimental.assert_cardinality(40)
    ),
    "random": lambda _: data.random(1).take(9),
}
GROUPED: dict[str, Make] = {
    "shuffle, group_by_window": lambda _: grouped(data.range(40).shuffle(4)),
    "repeat, by length": lambda _: by_length(data.range(40).repeat(2)),
}


def check_elements(servers: Servers, make: Make, directory: Path) -> None:
    expected = collections.Counter(values_of(make(directory)))
    assert sum(expected.values()) > 0
    assert collections.Counter(servers.elements(lambda: make(directory))) == expected


@pytest.mark.parametrize("name", PIPELINES)
def test_two_data_workers_prepare_each_element_once(
    two_workers: Servers, directory: Path, name: str
) -> None:
    check_elements(two_workers, PIPELINES[name], directory)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PIPELINES, *COUNTING, *GROUPED])
def test_one_data_worker_prepares_each_element_once(
    one_worker: Servers, directory: Path, name: str
) -> None:
    check_elements(one_worker, {**PIPELINES, **COUNTING, **GROUPED}[name], directory)


@pytest.mark.parametrize("name", COUNTING)
def test_what_two_data_workers_would_count_separately_is_refused(
    two_workers: Servers, directory: Path, name: str
) -> None:
    refusal = rf"calls {name}\(\) .* each of 2 data workers"
    with pytest.raises(hostopt.ConfigError, match=refusal):
        two_workers.elements(lambda: COUNTING[name](directory))


def test_a_number_of_random_choices_is_refused(one_worker: Servers) -> None:
    def make() -> Any:
        choices = data.random(1).map(lambda x: x % 2).take(9)
        return data.choose_from_datasets([data.range(40), data.range(40, 80)], choices)

    check_elements(one_worker, lambda _: make(), Path())
    refusal = r"calls take\(\) .* each of 2 data workers"
    with tf.Graph().as_default(), pytest.raises(hostopt.ConfigError, match=refusal):
        check_dataset(make(), 2)


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_two_data_workers_are_refused_after_shuffle_and_repeat(
    two_workers: Servers, directory: Path, name: str
) -> None:
    refusal = r"calls group_by_window\(\) .* each of 2 data workers read all data"
    with pytest.raises(hostopt.ConfigError, match=refusal):
        two_workers.elements(lambda: GROUPED[name](directory))


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
        (lambda: data.range(9), lambda: data.range(9).batch(3), True),
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
        assert (sources_of(first()) == sources_of(second())) == are_same


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
    assert len(before) == 3
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
