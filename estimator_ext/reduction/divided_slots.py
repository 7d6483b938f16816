"""The slots of updates that the ranks divide: each rank has the part that it updates.

The slots of the program have no values while it trains, so that reading one is an error. Rank 0
has all of them while it saves: a checkpoint is the same as without divided updates. The other
ranks never have more than their parts.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext._tf_private import replace_input
from estimator_ext.variables.sync_on_read import assign
from hostopt.collectives.call import Array

EMPTY = (0,)  # shape of a value that has been taken away


class DividedVariable(NamedTuple):
    """A variable of which each rank updates a part."""

    variable: tf.Variable
    slots: Sequence[tf.Variable]
    parts: list[slice]  # by rank, of its elements
    shape: list[int]  # of this rank's part


class _Slot:
    """A slot of the program, the whole, of which each rank has a part."""

    def __init__(self, whole: tf.Variable, parts: list[slice], shape: list[int]) -> None:
        ops, handle = tf.raw_ops, part_variable(whole, shape)
        dtype = whole.dtype.base_dtype
        self.whole = whole
        self.parts = parts  # by rank
        self.value = ops.ReadVariableOp(resource=whole.handle, dtype=dtype)
        self.has_value = ops.VarIsInitializedOp(resource=whole.handle)
        self.initial: tf.Tensor | None = None  # of the whole, which begins empty then
        if whole.initializer.type == "AssignVariableOp":
            self.initial = whole.initializer.inputs[1]
            # it may be fed with a whole slot
            replace_input(whole.initializer, 1, of_unknown_shape(tf.zeros(EMPTY, dtype)))
        self.part = ops.ReadVariableOp(resource=handle, dtype=dtype)
        self.new_part = tf.compat.v1.placeholder(dtype, shape)
        self.set_part = ops.AssignVariableOp(resource=handle, value=ops.DeepCopy(x=self.new_part))
        self.release = ops.DestroyResourceOp(resource=whole.handle, ignore_lookup_error=True)


class DividedSlots:
    """The slots of divided updates, and this rank's parts, in one session."""

    def __init__(
        self, communicator: hostopt.Communicator, divided: Sequence[DividedVariable] = ()
    ) -> None:
        self._communicator = communicator
        self._variables = [each.variable for each in divided]
        self._slots = [
            _Slot(slot, each.parts, each.shape) for each in divided for slot in each.slots
        ]
        self.names = {each.whole.op.name for each in self._slots}
        self._is_gathered = False

    def initialize(self, session: tf.compat.v1.Session) -> None:
        """Gives rank 0 the whole slots that no checkpoint has, before hooks may save them."""
        for each in self._slots if self._communicator.rank == 0 else ():
            if each.initial is not None and session.run(each.value).shape == EMPTY:
                value = tf.get_static_value(each.initial)  # a session would keep a constant
                if value is None:
                    value = session.run(each.initial)
                _assign(session, each.whole, value)

    def divide(self, session: tf.compat.v1.Session) -> None:
        """Gives each rank its parts of the slots of rank 0. Collective: all ranks must call it."""
        for each in self._slots:  # one by one, so that no rank has all slots twice
            parts = []
            if self._communicator.rank == 0:
                flat = session.run(each.value).reshape(-1)
                parts = [flat[part].tobytes() for part in each.parts]
            data = self._communicator.scatter_bytes(parts, f"slot {each.whole.op.name!r}")
            part = np.frombuffer(data, each.new_part.dtype.as_numpy_dtype)
            session.run(each.set_part, {each.new_part: part.reshape(each.new_part.shape)})
            session.run(each.release)
        for variable in self._variables:  # TensorFlow uses what they leave for the gradients
            _assign(session, variable, session.run(variable))
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # in glibc
        if trim is not None:  # malloc returns what it keeps to the system
            trim(0)

    def gather(self, session: tf.compat.v1.Session) -> None:
        """Gives rank 0 the whole slots, to be saved. Collective: all ranks must call it.

        Raises:
          hostopt.ConfigError: the program has assigned a slot.
        """
        self.release(session)  # if nothing was trained since the last save
        for each in self._slots:
            name = each.whole.op.name
            has_value, part = session.run([each.has_value, each.part])
            if has_value:
                raise hostopt.ConfigError(
                    f"slot {name!r} was assigned during the training, when each rank has a part, "
                    "as the ranks divide its updates. Assign it before, by a checkpoint, or pass "
                    "shard_optimizer=False"
                )
            parts = self._communicator.gather_bytes(part.tobytes(), f"slot {name!r}")
            if parts:
                _assign(session, each.whole, np.frombuffer(b"".join(parts), part.dtype))
                self._is_gathered = True

    @contextlib.contextmanager
    def explain(self) -> Iterator[None]:
        """Scope that says why a slot could not be read."""
        try:
            yield
        except tf.errors.FailedPreconditionError as error:
            for name in self.names:
                if f" {name} " in str(error) or f" {name}." in str(error):
                    raise hostopt.ConfigError(
                        f"slot {name!r} was read during the training, when each rank has only a "
                        "part, as the ranks divide its updates. Read it from a checkpoint, or "
                        "pass shard_optimizer=False"
                    ) from error
            raise

    def release(self, session: tf.compat.v1.Session) -> None:
        """Frees the whole slots of rank 0, after a save."""
        if self._is_gathered:
            session.run([each.release for each in self._slots])
            self._is_gathered = False


def _assign(session: tf.compat.v1.Session, variable: tf.Variable, value: Array) -> None:
    """Assigns a value in memory that the system gets back when it is freed.

    TensorFlow's allocator never returns its memory to the system, and malloc often keeps it.
    """
    memory = mmap.mmap(-1, max(value.nbytes, 1))
    copy = np.frombuffer(memory, value.dtype, value.size).reshape(variable.shape)
    np.copyto(copy, value.reshape(variable.shape))
    assign(session, [variable], [copy])


def part_variable(variable: tf.Variable, shape: list[int]) -> tf.Tensor:
    """Returns the handle of a variable of ours for this rank's part of another one."""
    return tf.raw_ops.VarHandleOp(
        dtype=variable.dtype.base_dtype,
        shape=shape,
        shared_name=f"divided_updates/{variable.op.name}",
    )


def of_unknown_shape(value: tf.Tensor) -> tf.Tensor:
    """Hides the shape of a tensor, so that it can replace an input of another shape."""
    return tf.raw_ops.PlaceholderWithDefault(input=value, shape=None)
