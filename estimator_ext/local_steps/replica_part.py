"""Variables of one dtype, which are synchronised as one array."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext.variables.sync_on_read import assign
from hostopt.collectives.finite import all_finite
from hostopt.collectives.wire_format import WireFormat, new_wire_format
from hostopt.gradients.quantized import NAMES as QUANTIZED
from hostopt.gradients.quantized import QuantizedSum
from hostopt.tensorflow.background import HOST_DEVICE


class ReplicaPart:
    """Variables of one dtype, and their values after the last synchronisation, of shape [n]."""

    def __init__(
        self,
        communicator: hostopt.Communicator,
        variables: list[tf.Variable],
        compression: str | None,
    ) -> None:
        self.communicator = communicator
        self.name = f"the differences of {len(variables)} variables from {variables[0].op.name!r}"
        self.variables = variables
        dtype = variables[0].dtype.base_dtype
        self._dtype = dtype.as_numpy_dtype
        # sums of the small dtypes are computed in float32
        self._sum_dtype = np.float64 if dtype == tf.float64 else np.float32
        self.wire_format: WireFormat | None = None
        self.quantized: QuantizedSum | None = None
        if self._sum_dtype is np.float32 and compression in QUANTIZED:
            self.quantized = QuantizedSum(communicator, compression)
        elif self._sum_dtype is np.float32:
            self.wire_format = new_wire_format(compression)
        self.anchor: Any = np.empty(0, self._sum_dtype)
        # anchor minus variables of this rank, later the mean over the ranks; and the variables
        self.difference: Any = None
        self._local: Any = None
        self._flat = self._joined_in_graph()

    def _joined_in_graph(self) -> tf.Tensor:
        """Joins the variables in one copy; a session copies variables that it returns."""
        with tf.device(HOST_DEVICE):
            values = [tf.cast(v.read_value(), self._sum_dtype) for v in self.variables]
            return tf.concat([tf.reshape(value, [-1]) for value in values], axis=0)

    def read(self, session: tf.compat.v1.Session) -> Any:
        """Returns the values of the variables, of shape [n]."""
        return session.run(self._flat)

    def read_anchor(self, session: tf.compat.v1.Session) -> None:
        """Reads the variables as anchor."""
        self.anchor = self.read(session)

    def read_first_anchor(self, session: tf.compat.v1.Session) -> None:
        """Reads the variables as anchor before the first step, and checks that it is finite."""
        self.read_anchor(session)
        self._check_finite(
            self.anchor,
            "is NaN or Inf before the first step, and local steps synchronise what the steps "
            "change in it. Initialize it with finite numbers, or leave sync_every, sync_secs and "
            "outer_optimizer out",
        )

    def split(self, flat: Any) -> list[Any]:
        """Returns the values of the variables in an array of shape [n], as views if possible."""
        sizes = [variable.shape.num_elements() for variable in self.variables]
        shapes = [variable.shape.as_list() for variable in self.variables]
        parts = np.split(flat, np.cumsum(sizes)[:-1])
        return [
            part.reshape(shape).astype(self._dtype, copy=False)
            for part, shape in zip(parts, shapes)
        ]

    def assign_local(self, session: tf.compat.v1.Session, flat: Any) -> Any:
        """Assigns values to the variables of this rank; returns them as the dtype rounds them.

        TensorFlow may keep the array and change it in the next step.
        """
        values = self.split(flat)
        assign(session, self.variables, values)
        if self._dtype is self._sum_dtype:
            return flat
        rounded = [each.reshape(-1).astype(self._sum_dtype, copy=False) for each in values]
        return np.concatenate(rounded)

    def check_anchor(self, step: int) -> None:
        """Checks that the anchor is finite, with the same result on all ranks."""
        self._check_finite(
            self.anchor,
            f"is NaN or Inf after the synchronisation at step {step}, and the variables of the "
            "ranks were finite. Lower the learning rate of the outer optimizer, or use another "
            "sync_compression",
            step=step,
        )

    def take(self, session: tf.compat.v1.Session, step: int) -> None:
        """Takes the difference: the anchor minus the variables, as a gradient for an outer step.

        It is checked to be finite.
        """
        self._local = self.read(session)
        self.difference = self.anchor - self._local
        cluster, rank = self.communicator.transport.cluster, self.communicator.rank
        self._check_finite(
            self.difference,
            f"of {cluster.describe(rank)} is NaN or Inf at the synchronisation after step {step}. "
            "Look at its data and its loss, lower the learning rate or clip",
            **cluster.attributes(rank),
            step=step,
        )

    def reduce(self, weight: float, *, is_whole: bool) -> None:
        """Replaces the difference by its mean. Any thread may call it.

        Collective: all ranks must call it.

        Args:
          weight: weight of this rank; the weights of all ranks add up to 1.
          is_whole: True leaves nothing out: no compression, and what was left out before is added.
        """
        self.difference *= self.difference.dtype.type(weight)
        if self.quantized is not None and not is_whole:
            self.quantized.sum_in_place(self.difference, self.name)
            return
        if self.quantized is not None:
            self.difference += self.quantized.take_residual()
        call = self.communicator.next_call(self.name)
        wire_format, op = None if is_whole else self.wire_format, hostopt.ReduceOp.SUM
        self.communicator.all_reduce_in_place(self.difference, op, call, wire_format)

    def progress(self, session: tf.compat.v1.Session) -> Any:
        """Returns what this rank has changed since the difference was taken."""
        local = self.read(session)
        local -= self._local
        return local

    def apply(self, session: tf.compat.v1.Session, is_late: bool) -> None:
        """Subtracts the mean from the anchor, and assigns the result.

        Args:
          is_late: True keeps what this rank has changed since the difference was taken.
        """
        if is_late:
            self.anchor -= self.difference
            progress = self.progress(session)
            progress += self.anchor
            self.assign_local(session, progress)
        else:
            new = np.subtract(self.anchor, self.difference, out=self.difference)
            self.anchor = self.assign_local(session, new).copy()
        self.free()

    def free(self) -> None:
        """Frees the difference, when it is applied."""
        self.difference = self._local = None

    def _check_finite(self, flat: Any, text: str, **attributes: Any) -> None:
        """Raises an error with the name of the first variable that is not finite, and a text."""
        if not all_finite(flat):
            finite = (np.isfinite(value).all() for value in self.split(flat))
            name = next(v.op.name for v, good in zip(self.variables, finite) if not good)
            raise hostopt.NonFiniteGradientError(f"variable {name!r} {text}", **attributes)
