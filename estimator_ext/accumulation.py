"""Gradient accumulation: several micro-batches for each reduction and update.

A step of the session takes the last micro-batch, reduces and updates. A hook runs the others
before it, so that hooks, summaries and global_step see one step for each update.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hostopt.tensorflow.background import HOST_DEVICE

__all__: list[str] = []

_log = tf.get_logger()


class Accumulation:
    """Means over the micro-batches of a step, built into the graph of a training.

    Args:
      micro_batches: how many a step has, at least 2.
      examples: scalar of float32, the number of examples in this micro-batch, by which it counts;
        None where all count alike.
    """

    def __init__(self, micro_batches: int, examples: tf.Tensor | None = None) -> None:
        self.micro_batches = micro_batches
        self._examples = examples
        self._additions: list[tf.Operation] = []
        self.is_used = False  # for any gradient
        self.all_examples = None if examples is None else self.total(examples, "examples")

    def mean(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """The mean of a tensor over the micro-batches of a step.

        Args:
          tensor: tensor of static shape and floating dtype, of one micro-batch.
          name: what it is, for the name of the accumulator.

        Returns:
          Tensor like it, on the host; to be computed once in each step.
        """
        self.is_used = True
        with tf.device(HOST_DEVICE):
            if self._examples is None:
                return self.total(tensor, name) / self.micro_batches
            total = self.total(tensor * tf.cast(self._examples, tensor.dtype), name)
            return tf.math.divide_no_nan(total, tf.cast(self.all_examples, tensor.dtype))

    def total(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """The sum of a tensor over the micro-batches of a step.

        Args:
          tensor: tensor of static shape and floating dtype, of one micro-batch.
          name: what it is, for the name of the accumulator.

        Returns:
          Tensor like it; to be computed once in each step.
        """
        with tf.device(HOST_DEVICE):
            accumulator = tf.compat.v1.Variable(
                # called outside of the step, on whose data an initializer must not depend
                lambda: tf.zeros(tensor.shape, tensor.dtype),
                trainable=False,
                collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
                name=f"accumulated/{name}",
                use_resource=True,
            )
            self._additions.append(accumulator.assign_add(tensor, read_value=False))
            total = accumulator.read_value() + tensor
            with tf.control_dependencies([total]):
                reset = accumulator.assign(tf.zeros_like(total), read_value=False)
            with tf.control_dependencies([reset]):
                return tf.identity(total)

    @property
    def additions(self) -> list[tf.Operation]:
        """What runs once for each micro-batch."""
        updates = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
        return [getattr(each, "op", each) for each in (*self._additions, *updates)]

    def hook(self) -> tf.compat.v1.train.SessionRunHook:
        """What runs the micro-batches before the last; to be made when all means are built."""
        additions = tf.group(*self.additions)
        return _MicroBatchesHook(self.micro_batches - 1, additions, self._examples is None)


class _MicroBatchesHook(tf.compat.v1.train.SessionRunHook):
    """Runs an operation several times before each step.

    Args:
      times: how often.
      operation: what is run.
      data_may_end: whether the data of this rank may end in the middle of a step.
    """

    def __init__(self, times: int, operation: tf.Operation, data_may_end: bool) -> None:
        self._times = times
        self._data_may_end = data_may_end
        self._operation = operation
        self._pending = 0

    def before_run(self, run_context: Any) -> None:
        """Add up micro-batches; data that end here end the training, as they would in the step.

        Args:
          run_context: of this step.
        """
        for _ in range(self._times):
            run_context.session.run(self._operation)
            self._pending += 1

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Note that they have made a step.

        Args:
          run_context: not used.
          run_values: not used.
        """
        del run_context, run_values
        self._pending = 0

    def end(self, session: tf.compat.v1.Session) -> None:
        """Say what the end of the data has left over.

        Args:
          session: not used.
        """
        del session
        if self._pending and self._data_may_end:
            _log.info(
                "the data ended after %d of %d micro-batches, which make no step",
                self._pending,
                self._times + 1,
            )
