"""Weights for ranks whose batches differ in length or whose data end: each example counts once.

In each step the ranks sum their numbers of examples, and the gradient of a rank is weighted by its
share. All ranks continue until the data of the last one end. A rank without data repeats its last
batch with weight 0. When no rank has data, all ranks stop before the step changes anything.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext.errors import UnsupportedError
from estimator_ext.pipelines.batch_lengths import UNKNOWN, first_read, length_of, lengths_of
from hostopt.collectives.call import Array
from hostopt.tensorflow._tf_private import call_python
from hostopt.tensorflow.background import HOST_DEVICE, abort_on_error, call_in_background

MODES = ("join", "stop")

_log = tf.get_logger()


class Needs(NamedTuple):
    """Needs of the batches of the ranks, so that each example counts once."""

    weights: bool  # as batches may differ in length between ranks or steps
    join: bool  # a rank without data has to repeat its last batch, which needs weights, too


def needs_of(
    data: Any, communicator: hostopt.Communicator, config: tf.compat.v1.ConfigProto
) -> Needs:
    """Returns what the batches of the ranks need, the same on all ranks; collective.

    Ranks repeat batches if the data of one may end, and all have datasets of plain tensors.
    """
    is_dataset = isinstance(data, tf.data.Dataset)
    specs = tf.nest.flatten(data.element_spec) if is_dataset else [None]
    can = all(isinstance(spec, tf.TensorSpec) and spec.shape.rank is not None for spec in specs)
    endless, length = lengths_of(data, config)
    local = np.array([can, not endless, length])
    can, ends, lengths = communicator.all_gather(local, "the kinds of the ranks' data").T
    join = bool(can.all() and ends.any())
    return Needs(join or UNKNOWN in lengths or len({*lengths}) > 1, join)


def check_endless(dataset: Any, config: tf.compat.v1.ConfigProto) -> None:
    """Checks that data without weights, which data workers divide unevenly, do not end."""
    if isinstance(dataset, tf.data.Dataset) and not lengths_of(dataset, config).endless:
        raise UnsupportedError(
            "the dataset of input_fn may end, and has sparse or ragged elements, or some of "
            "unknown rank. Data workers give ranks different numbers of batches, and a rank "
            "without data cannot repeat such a batch: return dense tensors (padded_batch), "
            "repeat() the data and set max_steps, or set RunConfig.data_service='off'"
        )


def repeat_last_batch(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Repeats the last element, or zeros, for ever; pairs each with False if it is repeated."""
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


def has_next(batch: Any) -> tf.Tensor:
    """Returns a tensor that is True for each batch, and fails at the end of the data."""
    tensors = [t for t in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(t)]
    read = [first_read(tensors)] if tensors else []
    with tf.device(HOST_DEVICE), tf.control_dependencies(read):
        return tf.constant(True)


class BatchWeights:
    """The weights of this rank's batch in a step, as tensors of the graph.

    Both are scalars of float64: `mean_weight` for a mean over all examples of the step, and
    `sum_weight`, 1 or 0, for a sum over the ranks. So is `share`, 1 / number of ranks with data.

    Args:
      examples, batches: scalars of float32, what this rank adds to the step.
    """

    def __init__(
        self,
        examples: tf.Tensor,
        batches: tf.Tensor,
        communicator: hostopt.Communicator,
        mode: str,
    ) -> None:
        self._scalar_sum = communicator.open_scalar_sum("the number of examples")
        self._communicator = communicator
        self._stops = mode == "stop"
        self._steps = self._idle_steps = 0
        with tf.device(HOST_DEVICE), tf.name_scope("batch_weights"):
            *weights, has_next = call_in_background(
                abort_on_error(communicator, self._exchange),
                [examples, batches],
                [tf.float64, tf.float64, tf.float64, tf.bool],
                name="HostCollect",
            )
            # not in the background, where StopIteration would not count as the end of the data
            ended = call_python(_stop_if_ended, [has_next], [tf.bool], "HostEndOfData")
            with tf.control_dependencies(ended):
                weights = [tf.identity(weight) for weight in weights]
        for weight in weights:
            weight.set_shape([])
        self.mean_weight, self.sum_weight, self.share = weights

    def _exchange(self, examples: Array, batches: Array) -> list[Any]:
        count, has_data = float(examples), bool(batches > 0)
        self._scalar_sum.start(count, float(has_data))
        total, ranks_with_data = self._scalar_sum.wait()
        size = self._communicator.size
        if ranks_with_data < (size if self._stops else 1):
            self._report(has_data)
            return [np.float64(0), np.float64(0), np.float64(0), np.False_]
        self._steps += 1
        self._idle_steps += not has_data
        # with this weight the mean of the ranks' means is the mean of all examples
        mean_weight = count * size / float(total) if total else 0.0
        share = np.float64(1 / ranks_with_data)
        return [np.float64(mean_weight), np.float64(has_data), share, np.True_]

    def _report(self, has_data: bool) -> None:
        rank = self._communicator.rank
        if self._stops:
            end = "has ended" if not has_data else "continues, but another rank's has ended"
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


def _stop_if_ended(has_next: Array) -> list[Array]:
    if not has_next:
        raise StopIteration  # which TensorFlow takes as the end of the data
    return [has_next]


def count_examples(element: Any, new: tf.Tensor) -> list[tf.Tensor]:
    """Returns the number of examples and 1, in float32; both are 0 for a repeated element."""
    batches = tf.cast(new, tf.float32)
    return [tf.cast(length_of(element), tf.float32) * batches, batches]


def _zeros(spec: tf.TensorSpec) -> tf.Tensor:
    lengths = spec.shape.as_list()  # in TensorFlow 1, iterating a shape gives objects
    return tf.zeros([1 if length is None else length for length in lengths], spec.dtype)


def _as_one(element: tuple[Any, ...], spec: Any) -> Any:
    """Returns an element in the structure of its dataset, as `map` unpacks tuples."""
    return element if type(spec) is tuple else element[0]
