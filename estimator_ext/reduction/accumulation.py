"""Gradient accumulation: several micro-batches for each reduction and update.

A hook runs all micro-batches but the last before the step. The step itself computes the last one,
reduces and updates. So hooks, summaries and global_step see one step for each update.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hostopt.tensorflow.background import HOST_DEVICE

_log = tf.get_logger()


class Accumulation(tf.compat.v1.train.SessionRunHook):
    """Means over the micro-batches of a step, and the hook that runs all of them but the last."""

    def __init__(self, micro_batches: int, examples: tf.Tensor | None = None) -> None:
        self.micro_batches = micro_batches
        # scalar of float32, the weight of this micro-batch in a mean; None if all weigh the same
        self._examples = examples
        self._assignments: list[tf.Operation] = []  # of the first micro-batch of a step
        self._additions: list[tf.Operation] = []
        self._runs: list[tf.Operation] = []  # for all micro-batches but the last
        self._pending = 0  # micro-batches that wait for a step
        self.is_used = False  # True once any mean is built
        self.all_examples = None if examples is None else self.total(examples, "examples")

    def mean(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Builds the mean of a tensor over the micro-batches of a step."""
        self.is_used = True
        with tf.device(HOST_DEVICE):
            if self._examples is None:
                return self.total(tensor, name) / self.micro_batches
            total = self.total(tensor * tf.cast(self._examples, tensor.dtype), name)
            return tf.math.divide_no_nan(total, tf.cast(self.all_examples, tensor.dtype))

    def total(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Builds the sum of a tensor over the micro-batches of a step."""
        with tf.device(HOST_DEVICE):
            accumulator = tf.compat.v1.Variable(
                # not run, as the first micro-batch of each step assigns a value
                lambda: tf.zeros(tensor.shape, tensor.dtype),
                trainable=False,
                collections=[],
                name=f"accumulated/{name}",
                use_resource=True,
            )
            self._assignments.append(accumulator.assign(tensor, read_value=False))
            self._additions.append(accumulator.assign_add(tensor, read_value=False))
            return accumulator.read_value() + tensor

    @property
    def additions(self) -> list[tf.Operation]:
        """The operations that run once for each micro-batch, except for the first and the last."""
        return self._with_updates(self._additions)

    def finish(self) -> None:
        """Completes the hook, when all means are built."""
        first, next_ = map(self._with_updates, (self._assignments, self._additions))
        self._runs = [tf.group(*first)] + [tf.group(*next_)] * (self.micro_batches - 2)

    def _with_updates(self, operations: list[tf.Operation]) -> list[tf.Operation]:
        updates = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
        return [getattr(each, "op", each) for each in (*operations, *updates)]

    def before_run(self, run_context: Any) -> None:
        """Accumulates all but the last micro-batch, unless the data end, as in a step."""
        for operation in self._runs:
            run_context.session.run(operation)
            self._pending += 1

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Resets the number of micro-batches that wait for a step."""
        self._pending = 0

    def end(self, session: tf.compat.v1.Session) -> None:
        """Logs micro-batches that the end of the data has left without a step."""
        if self._pending and self._examples is None:
            _log.info(
                "the data ended after %d of %d micro-batches, which make no step",
                self._pending,
                self.micro_batches,
            )
