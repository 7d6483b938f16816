"""Copies of variables on an accelerator with memory of its own, renewed as soon as an update ends.

Without them a step begins with the copy of all variables. With them the copies travel while other
variables are still being reduced and updated, and forward starts at once:

    step n      backward --> update of v --> renewal of v's copy
    step n + 1                                 forward reads the copy

[A1] The cached read of a variable takes the copy. In a run in which the copies may be stale, it
     takes the variable, as it would without copies.
[A2] The step renews a copy after all its operations that may change the variable, and after the
     cached read. Readers keep the old tensor, so a late one in backward sees the old value.
[A3] Every other operation that may change a variable makes the copies stale before it runs:
     initializers, restoring, and what hooks add.
[A4] `stale` counts the steps for which the copies may be stale. It is 2, not 1, because the
     change may come after the renewals of a step in the same run; the next step renews them again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from estimator_ext._tf_estimator import EstimatorSpec as StockSpec
from estimator_ext._tf_private import (
    add_control_inputs,
    cached_value_of,
    control_flow_context,
    replace_input,
)
from estimator_ext.graphs.operation_kinds import READS
from estimator_ext.graphs.walks import done, operations_before, users
from estimator_ext.spec import operations_of_step, stock_spec
from hostopt.tensorflow.background import HOST_DEVICE


def keep_copies(spec: StockSpec, device: str) -> StockSpec:
    """Makes a step read variables from copies on the accelerator, which it renews.

    Args:
      device: device of the copies.

    Returns:
      A stock spec whose train_op ends after all renewals, and whose last training hook must be the
      last of all hooks that add operations. For a device in host memory, the spec as it is.
    """
    if not _has_own_memory(device):
        return spec
    targets = operations_of_step(spec)
    with tf.device(HOST_DEVICE):
        renewed = tf.no_op("renewed_copies")
    hook = _CopiesHook(spec.scaffold, targets, renewed, device)
    return stock_spec(
        spec,
        train_op=tf.group(spec.train_op, renewed),
        training_hooks=[*spec.training_hooks, hook],
    )


def _has_own_memory(device: str) -> bool:
    return _short(device)[0] != "CPU"


def _short(device: str) -> tuple[str | None, int | None]:
    """Returns type and number of a device."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.device_type, spec.device_index


class _Cached(NamedTuple):
    """A variable, the operation on the accelerator that reads it, and what may change it."""

    handle: tf.Tensor
    dtype: tf.DType
    read: tf.Operation
    changes: list[tf.Operation]


class _CopiesHook(tf.compat.v1.train.SessionRunHook):
    """Builds the copies when all other hooks have added their operations.

    Args:
      scaffold: scaffold of the training.
      targets: operations that run in each step.
      renewed: operation that is to run after all renewals.
      device: device of the copies.
    """

    def __init__(
        self, scaffold: Any, targets: Sequence[tf.Operation], renewed: tf.Operation, device: str
    ) -> None:
        self._scaffold = scaffold
        self._targets = targets
        self._renewed = renewed
        self._device = device

    def begin(self) -> None:
        """Builds the copies in the complete graph."""
        step = operations_before(self._targets)
        has_saver = _build_saver(self._scaffold)
        variables = list(_cached_variables(step, self._device)) if has_saver else []
        if not variables:
            return
        with tf.device(HOST_DEVICE), tf.control_dependencies(None), tf.name_scope("copies"):
            stale = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name="copies/stale")
            is_stale = tf.raw_ops.ReadVariableOp(resource=stale, dtype=tf.int64) > 0
            spoil = tf.raw_ops.AssignVariableOp(resource=stale, value=tf.constant(2, tf.int64))
            with tf.control_dependencies([is_stale]):
                one = tf.constant(1, tf.int64)
                ends = [tf.raw_ops.AssignSubVariableOp(resource=stale, value=one)]
            if_fresh, if_stale = tf.raw_ops.Switch(data=is_stale, pred=is_stale)
            for variable in variables:
                for change in variable.changes:
                    if change not in step:
                        add_control_inputs(change, [spoil])  # [A3]
                changes = [done(op) for op in variable.changes if op in step]
                ends.append(self._copy(variable, changes, if_fresh, if_stale))
        add_control_inputs(self._renewed, ends)

    def _copy(
        self,
        variable: _Cached,
        changes: Sequence[tf.Operation],
        if_fresh: tf.Tensor,
        if_stale: tf.Tensor,
    ) -> tf.Operation:
        """Builds the copy of one variable, and returns its renewal."""
        handle, dtype, read, _ = variable
        with tf.device(self._device):
            copy = tf.raw_ops.VarHandleOp(
                dtype=dtype, shape=read.outputs[0].shape, shared_name=f"copies/{handle.op.name}"
            )
        with tf.control_dependencies([tf.identity(if_stale)]):
            original = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
        with tf.device(self._device), tf.control_dependencies([tf.identity(if_fresh)]):
            fresh = tf.raw_ops.ReadVariableOp(resource=copy, dtype=dtype)
            with tf.control_dependencies(None):
                value, _ = tf.raw_ops.Merge(inputs=[original, fresh])
        replace_input(read, 0, value)  # [A1]
        with tf.control_dependencies(changes):
            updated = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
        with tf.device(self._device), tf.control_dependencies([read]):
            return tf.raw_ops.AssignVariableOp(resource=copy, value=updated)  # [A2]


def _cached_variables(step: Collection[tf.Operation], device: str) -> Iterator[_Cached]:
    """Yields the variables that a step reads on the accelerator only as a whole.

    A variable that is changed within a branch or a loop of TensorFlow 1 is left out, as an
    operation outside cannot wait for one that may not run.
    """
    for variable in tf.compat.v1.trainable_variables():
        cached = cached_value_of(variable)
        if cached is None or cached.op not in step or _short(cached.device) != _short(device):
            continue
        changes = [op for op in users(variable.handle) if op.type not in READS]
        if all(control_flow_context(op) is None for op in changes):
            yield _Cached(variable.handle, variable.dtype, cached.op, changes)


def _build_saver(scaffold: Any) -> bool:
    """Adds the operations that restore variables, which TensorFlow adds after all hooks began.

    Returns:
      False if they cannot be added yet: the saver is a `tf.train.Checkpoint`.
    """
    savers = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SAVERS)
    saver = scaffold.saver or (savers and savers[0])
    if not isinstance(saver, tf.compat.v1.train.Saver):
        return False
    saver.build()
    return True
