"""Reads of variables that the program does not order with their update.

A divided update takes the value of a variable away until the new one is there, so that no reader
of the old value is left. A read that runs before the update, or after it, sees no difference. Any
other read, such as that of a summary, takes a copy instead, which a mutex keeps apart from the
update:

    step       lock the variables --> release them --> update them --> unlock
    any read   lock the variables --> copy one --> unlock --> read the copy
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tensorflow as tf

import hostopt
from estimator_ext._tf_private import add_control_inputs, replace_input
from estimator_ext.graphs.operation_kinds import READS
from estimator_ext.graphs.walks import (
    PASSES_VARIABLE,
    arguments_of,
    depends_on,
    operations_before,
)
from hostopt.tensorflow.background import HOST_DEVICE

_NEED_NO_VALUE = ("VarIsInitializedOp", "IsVariableInitialized")


@dataclass(eq=False)
class Window:
    """The time in which a step has taken the values of some variables away."""

    variables: Sequence[tf.Variable]
    mutex: tf.Tensor
    end: tf.Operation  # runs when the new values are there

    def lock(self) -> tf.Tensor:
        """Returns a lock, which is held until the last operation that takes it has run."""
        return tf.raw_ops.MutexLock(mutex=self.mutex)


def new_mutex(name: str) -> tf.Tensor:
    """Returns the handle of a mutex."""
    return tf.raw_ops.MutexV2(shared_name=name)


class UnorderedReadsHook(tf.compat.v1.train.SessionRunHook):
    """Makes unordered reads take copies, when all other hooks have added their operations."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self._windows = windows

    def begin(self) -> None:
        """Finds the reads in the complete graph."""
        variables = [*tf.compat.v1.global_variables(), *tf.compat.v1.local_variables()]
        starts = operations_before(v.initializer for v in variables if v.initializer is not None)
        with tf.device(HOST_DEVICE), tf.control_dependencies(None), tf.name_scope("copied_reads"):
            for window in self._windows:
                ordered = starts | operations_before([window.end])
                for variable in window.variables:
                    for op in variable.handle.consumers():
                        is_after = op not in ordered and depends_on([op], [window.end])
                        if op not in ordered and not is_after and _reads(op, variable):
                            _copy_for(op, variable, window)


def _copy_for(op: tf.Operation, variable: tf.Variable, window: Window) -> None:
    """Makes an operation read a copy of a variable, taken at a time at which it has a value."""
    ops, dtype, name = tf.raw_ops, variable.dtype.base_dtype, variable.op.name
    copy = ops.VarHandleOp(dtype=dtype, shape=variable.shape, shared_name=f"copied_reads/{name}")
    with tf.control_dependencies(op.control_inputs):
        lock = window.lock()
    with tf.control_dependencies([lock.op]):
        value = ops.DeepCopy(x=ops.ReadVariableOp(resource=variable.handle, dtype=dtype))
    with tf.control_dependencies([ops.AssignVariableOp(resource=copy, value=value)]):
        unlock = ops.ConsumeMutexLock(mutex_lock=lock)
    for index, tensor in enumerate(op.inputs):
        if tensor is variable.handle:
            replace_input(op, index, copy)
    add_control_inputs(op, [unlock])


def _reads(op: tf.Operation, variable: tf.Variable) -> bool:
    """Returns True if an operation that takes the handle of a variable only reads its value."""
    uses = list(_uses(op, variable.handle))
    if all(each.type in READS for each in uses):
        return op.type not in _NEED_NO_VALUE
    if uses != [op]:
        raise hostopt.ConfigError(
            f"{op.name!r} changes {variable.op.name!r} in a branch, a loop or a function, perhaps "
            "while the ranks divide its update. Make it run after the step, by "
            "tf.control_dependencies([train_op]), or pass shard_optimizer=False"
        )
    return False


def _uses(op: tf.Operation, handle: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields what reads or changes a variable that one of its consumers takes."""
    within = op.outputs if PASSES_VARIABLE.match(op.type) else list(arguments_of(op, handle))
    if not within:
        yield op
    for each in within:
        for consumer in each.consumers():
            yield from _uses(consumer, each)
