"""Copies of variables on an accelerator with memory of its own, renewed as soon as an update ends.

Without them a step begins with the copy of all variables. With them the copies travel while other
variables are still being reduced and updated:

    step n      backward --> update of v --> renewal of v's copy
    step n + 1                                 forward reads the copy

[A1] The cached read of a variable takes the copy. In a run in which the copies may be stale, it
     takes the variable, as it would without copies.
[A2] The step renews a copy after all its operations that may change the variable, and after the
     cached read. Readers keep the old tensor, so a late one in backward sees the old value.
[A3] Operations of the step that may change a variable first set `changing`, which the end of all
     renewals clears. So the copies are stale after a run with only a part of the step: a
     micro-batch, a hook that runs an update again, a step that fails.
[A4] Any other operation that may change a variable (initializers, restoring, what hooks and
     summaries add) first sets `stale` to 2, too, and each step takes 1 from it. It is not 1, as
     the change may come after the renewals of a step in the same run; the next step renews them
     again.
[A5] TensorFlow pins host memory that it allocates for the output of an operation whose consumer is
     on a GPU. A read allocates nothing, so a variable stays in the memory of its first value. When
     a session begins, each variable takes an output that is sent to the GPU, and its updates in
     place stay there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
from estimator_ext.graphs.placement import is_on
from estimator_ext.graphs.walks import done, operations_before, users
from hostopt.tensorflow.background import HOST_DEVICE

_log = tf.get_logger()


class CopiesHook(tf.compat.v1.train.SessionRunHook):
    """Builds the copies on a device when all other hooks have added their operations."""

    def __init__(self, spec: StockSpec, device: str, pins: bool) -> None:
        self._scaffold = spec.scaffold
        self._targets = [getattr(each, "op", each) for each in (spec.train_op, spec.loss)]
        self._device = device
        with tf.device(HOST_DEVICE):
            self.renewed = tf.no_op("renewed_copies")  # part of the step, runs after all renewals
        self._must_pin = pins  # False if all memory of the session is pinned
        self._pins: list[tf.Operation] = []  # the last of them, which runs all

    def begin(self) -> None:
        """Builds the copies in the complete graph."""
        step = operations_before(self._targets)
        reads = _cached_reads(step, self._device)
        if not reads or not _build_saver(self._scaffold):
            return
        cached = [_Cached(v.handle, v.dtype, read, _changes_of(v)) for read, v in reads.items()]
        # an operation after all changes cannot wait for one in a branch or a loop of TensorFlow 1
        variables = [e for e in cached if not any(map(control_flow_context, e.changes))]
        _log.info("%d of %d variables have copies on the accelerator", len(variables), len(cached))
        if not variables:
            return
        with tf.device(HOST_DEVICE), tf.control_dependencies(None), tf.name_scope("copies"):
            flags = _Flags()
            ends = {}  # of the changes in a step; an operation may change several variables
            for change in dict.fromkeys(op for each in variables for op in each.changes):
                add_control_inputs(change, [flags.changing if change in step else flags.spoil])
                if change in step:
                    ends[change] = done(change)
            renewals = []
            for each in variables:
                changes = [ends[op] for op in each.changes if op in ends]
                renewals.append(self._copy(each, changes, flags))
            with tf.control_dependencies(renewals):
                add_control_inputs(self.renewed, flags.freshen())

    def after_create_session(self, session: tf.compat.v1.Session, coord: object) -> None:
        """Pins the memory of the variables, one after another, as far as there is some: [A5]."""
        try:
            session.run(self._pins)
        except tf.errors.ResourceExhaustedError as error:
            _log.warning(
                "not all variables fit into pinned memory, so their copies to the accelerator are "
                "slower. Raise TF_GPU_HOST_MEM_LIMIT_IN_MB, or give the host more memory: %s",
                error.message,
            )

    def _copy(
        self, variable: _Cached, changes: Sequence[tf.Operation], flags: _Flags
    ) -> tf.Operation:
        handle, dtype, read, _ = variable
        with tf.device(self._device):
            copy = tf.raw_ops.VarHandleOp(
                dtype=dtype, shape=read.outputs[0].shape, shared_name=f"copies/{handle.op.name}"
            )
        with tf.control_dependencies([tf.identity(flags.if_stale)]):
            original = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
        with tf.device(self._device), tf.control_dependencies([tf.identity(flags.if_fresh)]):
            fresh = tf.raw_ops.ReadVariableOp(resource=copy, dtype=dtype)
            with tf.control_dependencies(None):
                value, _ = tf.raw_ops.Merge(inputs=[original, fresh])
        replace_input(read, 0, value)  # [A1]
        if self._must_pin:
            self._pin(handle, copy, dtype)
        with tf.control_dependencies(changes):
            updated = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
        with tf.device(self._device), tf.control_dependencies([read]):
            return tf.raw_ops.AssignVariableOp(resource=copy, value=updated)  # [A2]

    def _pin(self, handle: tf.Tensor, copy: tf.Tensor, dtype: tf.DType) -> None:  # [A5]
        with tf.control_dependencies(self._pins):
            pinned = tf.raw_ops.DeepCopy(x=tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))
        with tf.device(self._device):
            sent = tf.raw_ops.AssignVariableOp(resource=copy, value=pinned)
        kept = tf.raw_ops.AssignVariableOp(resource=handle, value=pinned)
        self._pins = [tf.group(sent, kept)]


class _Flags:
    """Operations on the two flags: [A3] and [A4].

    They are built in the host's part of the graph. `changing` and `spoil` set the flags; one of
    `if_fresh` and `if_stale` is alive in each run.
    """

    def __init__(self) -> None:
        ops = tf.raw_ops
        self._stale, self._changing = (
            ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=f"copies/{name}")
            for name in ("stale", "changing")
        )
        self._left = tf.minimum(ops.ReadVariableOp(resource=self._stale, dtype=tf.int64), 1)
        changes = ops.ReadVariableOp(resource=self._changing, dtype=tf.int64)
        is_stale = self._left + changes > 0
        self.if_fresh, self.if_stale = ops.Switch(data=is_stale, pred=is_stale)
        with tf.control_dependencies([self._set(self._changing, 1)]):  # gives it a value at first
            self.spoil = self._set(self._stale, 2)
        with tf.control_dependencies([is_stale]):  # which is the state before this run
            self.changing = self._set(self._changing, 1)

    def freshen(self) -> list[tf.Operation]:
        """Returns the operations at the end of a step."""
        one_less = tf.raw_ops.AssignSubVariableOp(resource=self._stale, value=self._left)
        return [one_less, self._set(self._changing, 0)]

    def _set(self, flag: tf.Tensor, value: int) -> tf.Operation:
        return tf.raw_ops.AssignVariableOp(resource=flag, value=tf.constant(value, tf.int64))


class _Cached(NamedTuple):
    handle: tf.Tensor
    dtype: tf.DType
    read: tf.Operation  # on the accelerator
    changes: list[tf.Operation]  # what may change the variable


def _cached_reads(step: Collection[tf.Operation], device: str) -> dict[tf.Operation, tf.Variable]:
    """Returns the variables that a step reads on the accelerator as a whole, by their reads."""
    found: dict[tf.Operation, tf.Variable] = {}
    for variable in tf.compat.v1.trainable_variables():
        cached = cached_value_of(variable)
        if cached is not None and cached.op in step and is_on(cached.op, device):
            found[cached.op] = variable
    return found


def _changes_of(variable: tf.Variable) -> list[tf.Operation]:
    return [op for op, _ in users(variable.handle) if op.type not in READS]


def _build_saver(scaffold: Any) -> bool:
    """Adds the operations that restore variables, which TensorFlow adds after all hooks began.

    Returns False if they cannot be added yet: the saver is a `tf.train.Checkpoint`.
    """
    savers = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SAVERS)
    saver = scaffold.saver or (savers and savers[0])
    if not isinstance(saver, tf.compat.v1.train.Saver):
        return False
    saver.build()
    return True
