"""Readers of pipelines that save their positions, and continue in another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import numpy as np
import tensorflow as tf

import estimator_ext
import hostopt
from estimator_ext.input import state as input_state
from estimator_ext.input.state import InputStates
from estimator_ext.reduction.uneven_data import has_next

EXAMPLES, BATCH = 40, 3


v1 = tf.compat.v1


Pipeline = Callable[[int, int], tf.data.Dataset]


def another_process() -> None:
    """Makes the code that follows look like another process."""
    input_state._identifier.cache_clear()


def shuffled(size: int, rank: int, seed: int = 3, offset: int = 0) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices(np.arange(EXAMPLES) + offset).shard(size, rank)
    return dataset.shuffle(10, seed=seed).repeat().batch(BATCH).prefetch(2)


def through_python(size: int, rank: int) -> tf.data.Dataset:
    def same(batch: tf.Tensor) -> tf.Tensor:
        return tf.numpy_function(lambda x: x, [batch], tf.int64)

    return shuffled(size, rank).map(same)


class Reader:
    """A rank that reads batches and saves states, as a training of an Estimator does."""

    def __init__(self, communicator: hostopt.Communicator, *pipelines: Pipeline) -> None:
        self.states_of = communicator
        rank, size = communicator.rank, communicator.size
        self.data_have_ended = False
        with tf.Graph().as_default():
            datasets = [pipeline(size, rank) for pipeline in pipelines]
            makes = v1.data.make_one_shot_iterator, v1.data.make_initializable_iterator
            iterators = [makes[index % 2](dataset) for index, dataset in enumerate(datasets)]
            self._batches = [iterator.get_next() for iterator in iterators]
            self.states = InputStates(
                communicator, lambda: self.data_have_ended, has_next(self._batches)
            )
            self._initializers = [i.initializer for i in iterators if i._initializer is not None]
            self.session = v1.Session()

    def begin(self, checkpoint: str | None) -> Reader:
        self.session.run(self._initializers)
        self.states.restore(self.session, checkpoint)
        return self

    def read(self, count: int) -> list[Any]:
        """Returns the examples of the next batches."""
        batches = [self.session.run(self._batches) for _ in range(count)]
        return [[batch.tolist() for batch in step] for step in batches]

    def save(self, checkpoint: str) -> None:
        if self.states_of.size > 1:
            self.states.gather(self.session)
        if self.states_of.rank == 0:
            self.states.write(self.session, checkpoint)


def save_and_continue(
    communicator: hostopt.Communicator, path: str, *pipelines: Pipeline
) -> list[Any]:
    """Reads, saves, and returns the batches that follow."""
    reader = Reader(communicator, *pipelines).begin(None)
    reader.read(7)
    reader.save(path)
    return reader.read(20)


def resumed(communicator: hostopt.Communicator, path: str, *pipelines: Pipeline) -> list[Any]:
    checkpoint = path if communicator.rank == 0 else None
    return Reader(communicator, *pipelines).begin(checkpoint).read(20)


def fresh(communicator: hostopt.Communicator, *pipelines: Pipeline) -> list[Any]:
    return Reader(communicator, *pipelines).begin(None).read(20)


class Seen(v1.train.SessionRunHook):
    """Records the batches of a training."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def before_run(self, run_context: Any) -> v1.train.SessionRunArgs:
        return v1.train.SessionRunArgs(v1.get_collection("batch")[-1])

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.batches.append(run_values.results.tolist())


class Initialise(v1.train.SessionRunHook):
    """Initializes an iterator that input_fn creates, like a hook of the user."""

    initializer: tf.Operation

    def after_create_session(self, session: v1.Session, coord: Any) -> None:
        session.run(self.initializer)


def train(
    model_dir: Path, dataset: Callable[[], tf.data.Dataset], steps: int, by_hook: bool
) -> list[Any]:
    """Returns the batches of one `train` of an Estimator on a single rank."""
    initialise, observed = Initialise(), Seen()

    def input_fn() -> Any:
        if not by_hook:
            return dataset()
        iterator = v1.data.make_initializable_iterator(dataset())
        initialise.initializer = iterator.initializer
        return iterator.get_next()

    def model_fn(features: tf.Tensor, mode: str) -> Any:
        v1.add_to_collection("batch", features)
        weight = v1.get_variable("weight", [], initializer=tf.zeros_initializer())
        loss = tf.reduce_mean((weight - tf.cast(features, tf.float32)) ** 2)
        optimizer = v1.train.GradientDescentOptimizer(1e-3)
        train_op = optimizer.minimize(loss, v1.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    config = tf.estimator.RunConfig(train_distribute=estimator_ext.HostOffloadStrategy())
    estimator = estimator_ext.Estimator(model_fn, str(model_dir), config)
    estimator.train(input_fn, hooks=[observed, *([initialise] if by_hook else [])], steps=steps)
    return observed.batches
