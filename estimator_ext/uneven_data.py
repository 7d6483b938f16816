"""Ranks whose data end at different steps: all stay until the last, and each example counts once.

A rank without data goes on with its last batch and weight zero. Each step the ranks add up how
many examples they have, and a rank's gradient counts by its part of them. When nobody has any, the
data have ended for all of them, before the step changes anything.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from hostopt.posted_sum import open_posted_sum
from hostopt.tensorflow.background import HOST_DEVICE, abort_on_error, call_in_background

__all__: list[str] = []

MODES = ("join", "stop")

_log = tf.get_logger()


def followed(
    dataset: Any, communicator: hostopt.Communicator, config: tf.compat.v1.ConfigProto
) -> bool:
    """Whether the ends of the ranks' data are to be followed; all ranks call this together.

    Args:
      dataset: what input_fn returned.
      communicator: the ring.
      config: for a session that asks how long the dataset is.

    Returns:
      True where the data of a rank may end, and those of all ranks are datasets of plain tensors.
    """
    specs = tf.nest.flatten(dataset.element_spec) if _is_dataset(dataset) else [None]
    can = all(isinstance(spec, tf.TensorSpec) and spec.shape.rank is not None for spec in specs)
    ends = True
    if can:
        with tf.compat.v1.Session(config=config) as session:
            length = session.run(tf.data.experimental.cardinality(dataset))
        ends = length != tf.data.experimental.INFINITE_CARDINALITY
    facts = communicator.all_gather(np.array([can, ends]), "the kinds of the ranks' data")
    return bool(facts[:, 0].all() and facts[:, 1].any())


def endless(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset that goes on with its last element, or with zeros where it has none.

    Args:
      dataset: elements of plain tensors.

    Returns:
      Pairs of an element and whether it is a new one.
    """
    spec = dataset.element_spec
    zeros = tf.nest.map_structure(_zeros, spec)

    def mark(*element: Any) -> Any:
        return _as_one(element, spec), True

    def step(last: Any, item: Any) -> Any:
        element, new = item
        kept = tf.cond(new, lambda: element, lambda: last)
        for one, of in zip(tf.nest.flatten(kept), tf.nest.flatten(spec)):
            one.set_shape(of.shape)
        return kept, (kept, new)

    after = tf.data.Dataset.from_tensors(zeros).map(lambda *e: (_as_one(e, spec), False)).repeat()
    return dataset.map(mark).concatenate(after).scan(zeros, step).prefetch(1)


def goes_on(batch: Any) -> tf.Tensor:
    """Whether there is another batch, as a tensor that fails with the end of the data.

    Args:
      batch: features and labels, of whatever structure.

    Returns:
      Scalar of bool, True.
    """
    tensors = [t for t in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(t)]
    with tf.device(HOST_DEVICE), tf.control_dependencies(tensors[:1]):
        return tf.constant(True)


class BatchWeights:
    """How much this rank's batch counts in a step, as operations of the graph.

    Args:
      examples: scalar of float32, how many examples this rank has in the step.
      batches: scalar of float32, how many new batches.
      communicator: the ring.
      mode: "join" ends with the last rank's data, "stop" with the first's.
    """

    def __init__(
        self,
        examples: tf.Tensor,
        batches: tf.Tensor,
        communicator: hostopt.Communicator,
        mode: str,
    ) -> None:
        self._posted = open_posted_sum(communicator, "the number of examples")
        self._communicator = communicator
        self._stops = mode == "stop"
        self._steps = self._idle_steps = 0
        with tf.device(HOST_DEVICE), tf.name_scope("batch_weights"):
            in_mean, in_sum, goes_on = call_in_background(
                abort_on_error(communicator, self._exchange),
                [examples, batches],
                [tf.float64, tf.float64, tf.bool],
                name="HostCollect",
            )
            # not in the background: there, StopIteration would be an error like others
            ended = tf.numpy_function(_stop_if_ended, [goes_on], tf.bool, name="HostEndOfData")
            with tf.control_dependencies([ended]):
                self.in_mean, self.in_sum = tf.identity(in_mean), tf.identity(in_sum)
        self.in_mean.set_shape([])
        self.in_sum.set_shape([])

    def _exchange(self, examples: np.ndarray, batches: np.ndarray) -> list[Any]:
        own, has_data = float(examples), bool(batches > 0)
        self._posted.post(own, float(has_data))
        total, ranks_with_data = self._posted.collect()
        size = self._communicator.size
        if ranks_with_data < (size if self._stops else 1):
            self._report(has_data)
            return [np.float64(0), np.float64(0), np.False_]
        self._steps += 1
        self._idle_steps += not has_data
        share = own * size / float(total) if total else 0.0
        return [np.float64(share), np.float64(has_data), np.True_]

    def _report(self, has_data: bool) -> None:
        rank = self._communicator.rank
        if self._stops:
            end = "has ended" if not has_data else "goes on, that of another rank has ended"
            _log.info("rank %d: its data %s after %d steps", rank, end, self._steps)
        elif self._idle_steps:
            _log.info(
                "rank %d: its data ended after %d steps; it took part in %d more with weight zero",
                rank,
                self._steps - self._idle_steps,
                self._idle_steps,
            )
        else:
            _log.info("rank %d: its data ended after %d steps, the last", rank, self._steps)


def _stop_if_ended(goes_on: np.ndarray) -> Any:
    if not goes_on:
        raise StopIteration  # to TensorFlow: the data have ended
    return goes_on


def count_examples(element: Any, new: tf.Tensor) -> list[tf.Tensor]:
    """How many examples a batch has, and whether it counts as a batch.

    Args:
      element: features and perhaps labels.
      new: whether it is a new element.

    Returns:
      Two scalars of float32: the length of the first tensor, or 1 for a scalar, and 1; both 0 for
      an old element.
    """
    first = tf.nest.flatten(element)[0]
    count = tf.shape(first)[0] if first.shape.rank else 1
    batches = tf.cast(new, tf.float32)
    return [tf.cast(count, tf.float32) * batches, batches]


def _is_dataset(dataset: Any) -> bool:
    return isinstance(dataset, tf.data.Dataset)


def _zeros(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros([1 if length is None else length for length in spec.shape], spec.dtype)


def _as_one(element: tuple[Any, ...], spec: Any) -> Any:
    """The element as the dataset has it, of which `map` has unpacked a tuple."""
    return element if type(spec) is tuple else element[0]
