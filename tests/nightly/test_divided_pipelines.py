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
from pipelines import (
    Make,
    data,
    lines,
    number,
    ten,
    texts,
    values_of,
    write_files,
)
from ranks import Ranks

import hostopt
from estimator_ext.pipelines.divided_pipeline import check_dataset, divisible

service = tf.data.experimental.service


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


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    yield from served_by(1, tmp_path_factory)


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    yield from served_by(2, tmp_path_factory)


def served_by(size: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with Ranks(tmp_path_factory.mktemp("servers")) as ranks:
        (process,) = ranks.start("data_servers.py", {"data": ["unused"]}, arguments=[str(size)])
        process.wait_for_output("serves at ")
        yield Servers(size, process.output.rpartition("serves at ")[2].split()[0])


def records(path: Path, **options: Any) -> Any:
    files = sorted(map(str, path.glob("*.tfrecord")))
    return tf.data.TFRecordDataset(files, **options).map(number)


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
