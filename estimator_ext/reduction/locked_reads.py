"""Reads of variables of which the ranks divide the updates.

Between the old and the new value such a variable has none. So a mutex keeps reads and updates
apart:

    update    lock --> destroy the variable --> update its memory --> give it back --> unlock
    read      lock --> read --> unlock --> what uses the value

What has been read stays as it is: an update takes other memory if anything still refers to this
one. But TensorFlow lets operations write into their input if nothing else refers to it and if it
owns its memory. A variable does not own memory of NumPy, but a slice of it says so. Therefore only
operations that are known to compute a new value get a variable as it is, and others get a copy.

If a session fetches the program's own operation, nothing that comes after it is sure to run, such
as an unlock. So this operation takes the value from a variable of its own, which exists for one
execution. Only the read that stands for a variable, by which savers find it, takes the variable
itself: in a step it comes before the update, and who fetches the variable gets a locked read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf

import hostopt
from estimator_ext._tf_private import (
    ANONYMOUS_VARIABLE,
    add_control_inputs,
    control_flow_context,
    control_outputs,
    replace_inputs,
    replace_tensor,
    set_fetched,
)
from estimator_ext.graphs.operation_kinds import GATHERS, READS
from estimator_ext.graphs.walks import (
    CALLS,
    PASSES_VARIABLE,
    functions_called,
    operations_before,
    runs_after,
    uses,
    walk,
)
from estimator_ext.reduction.divided_slots import SharedSlot
from hostopt.tensorflow.background import HOST_DEVICE

_NEED_NO_VALUE = ("VarIsInitializedOp", "IsVariableInitialized")
# Their results may be in the memory of their input, but are not slices.
_SAME_MEMORY = re.compile(
    r"Identity|IdentityN|Reshape|ExpandDims|Squeeze|StopGradient|PreventGradient|CheckNumerics"
    r"|Snapshot|PlaceholderWithDefault|Cast|Transpose|AddN|Sum|Mean|Max|Min|Prod|All|Any"
)
# Their results are in memory of their own.
_NEW_MEMORY = re.compile(
    r"(Batch|Sparse)?MatMul(V2|V3)?|(Depthwise)?Conv\w*|BiasAdd(V1|Grad)?|Add(V2)?|Sub|Mul(NoNan)?"
    r"|RealDiv|Square(dDifference)?|L2Loss|Abs|Neg|Sign|Tanh|Exp|Log|Sqrt|Rsqrt|IsFinite|IsNan"
    r"|Gather(V2|Nd)?|FusedBatchNorm\w*|LSTMBlockCell\w*|GRUBlockCell\w*|BlockLSTM\w*"
    r"|(Shape|ShapeN|Size|Rank|SaveV2|DeepCopy)|\w*Summary\w*"
)


@dataclass(eq=False)
class Window:
    """The time in which a step has taken the values of some variables away."""

    variables: Sequence[tf.Variable]
    slots: Sequence[SharedSlot]  # which the ranks update meanwhile
    updates: Sequence[tf.Operation]
    mutex: tf.Tensor
    lock: tf.Tensor  # held until the last operation that takes it has run, as every lock
    end: tf.Operation  # runs when the new values are there


def can_lock(op: tf.Operation) -> bool:
    """Returns True if a lock can be held while an operation uses the handle of a variable.

    It cannot in branches and loops of TensorFlow 1, and in functions that run later, such as those
    of a dataset.
    """
    if control_flow_context(op) is not None or PASSES_VARIABLE.match(op.type):
        return False
    return op.type in CALLS or not any(True for _ in functions_called(op))


def initializing() -> set[tf.Operation]:
    """Returns the operations that initialize variables: they run before all steps."""
    variables = [*tf.compat.v1.global_variables(), *tf.compat.v1.local_variables()]
    return operations_before(v.initializer for v in variables if v.initializer is not None)


class _Locked(NamedTuple):
    """A variable that is read under a lock."""

    variable: tf.Variable
    source: tf.Tensor  # handle that has the value: of the variable, or of the memory of a slot
    read: tf.Operation  # that stands for the variable


class LockedReadsHook(tf.compat.v1.train.SessionRunHook):
    """Makes reads take locks, when all other hooks have added their operations."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self._windows = windows

    def begin(self) -> None:
        """Finds the reads in the complete graph."""
        starts = initializing()
        with tf.device(HOST_DEVICE), tf.control_dependencies(None), tf.name_scope("locked_reads"):
            for window in self._windows:
                own = _between(window) | {slot.value.op for slot in window.slots}
                graph = tf.compat.v1.get_default_graph()
                locked = [
                    _Locked(each, each.handle, graph.as_graph_element(each).op)
                    for each in window.variables
                ]
                locked += [_Locked(e.whole, e.readable, e.read) for e in window.slots]
                for each in locked:
                    for op in each.variable.handle.consumers():
                        if op not in own:
                            _lock(op, each, window, starts)
                for update in window.updates:
                    for op in control_outputs(update):  # of the program, and of its hooks
                        if op not in own:
                            add_control_inputs(op, [window.end])


def _between(window: Window) -> set[tf.Operation]:
    """Returns the operations of a window."""
    before = operations_before([window.end])
    return set(walk([window.lock.op], lambda op: before.intersection(runs_after(op))))


def _lock(
    op: tf.Operation, locked: _Locked, window: Window, starts: Collection[tf.Operation]
) -> None:
    """Makes an operation that takes the handle of a variable wait for its value."""
    variable = locked.variable
    if op.type in _NEED_NO_VALUE or (op in starts and not can_lock(op)):
        return
    users = [user for user, _ in uses(op, variable.handle)]
    if users == [op] and op.type not in READS:  # a change
        return
    if not can_lock(op) or not all(each.type in READS for each in users):
        raise hostopt.ConfigError(
            f"{op.name!r} uses variable {variable.op.name!r} in a branch, a loop or a function, "
            "perhaps while the ranks divide its update. Use its value, by tf.identity(variable), "
            "or pass shard_optimizer=False"
        )
    is_slot = locked.source is not variable.handle
    ready = [tensor.op for tensor in op.inputs if tensor is not variable.handle]
    value = _locked_read(locked.source, is_slot, window, [*op.control_inputs, *ready])
    if op.type == "ReadVariableOp":
        _use_instead(op.outputs[0], value)
        if not is_slot:
            _protect(value, set())
    elif op.type in GATHERS:  # which would copy the whole value
        _use_instead(op.outputs[0], _gather(op, value))
    if op is locked.read:
        if not is_slot:
            set_fetched(variable, value)
            add_control_inputs(window.lock.op, [op])
        return
    if op.type in CALLS and not is_slot:  # which may write into the memory of the value
        value = tf.raw_ops.DeepCopy(x=value)
    own = tf.raw_ops.VarHandleOp(
        dtype=value.dtype, shape=variable.shape, shared_name=ANONYMOUS_VARIABLE
    )
    replace_inputs(op, variable.handle, own)
    add_control_inputs(op, [tf.raw_ops.AssignVariableOp(resource=own, value=value)])


def make_readable(window: Window) -> None:
    """Makes sessions and hooks that fetch a slot get its value."""
    for slot in window.slots:
        set_fetched(slot.whole, _locked_read(slot.readable, True, window, []))


def _locked_read(
    source: tf.Tensor, copies: bool, window: Window, after: Sequence[tf.Operation]
) -> tf.Tensor:
    """Returns the value of a variable when some operations have run."""
    ops = tf.raw_ops
    dtype = source.op.get_attr("dtype")
    with tf.control_dependencies(after):
        lock = ops.MutexLock(mutex=window.mutex)
    with tf.control_dependencies([lock.op]):
        value = ops.ReadVariableOp(resource=source, dtype=dtype)
    if copies:
        value = ops.DeepCopy(x=value)
    with tf.control_dependencies([value.op]):
        unlock = ops.ConsumeMutexLock(mutex_lock=lock)
    with tf.control_dependencies([unlock]):
        return tf.identity(value)


def _use_instead(old: tf.Tensor, new: tf.Tensor) -> None:
    """Connects everything that uses a value, or waits for it, to another one."""
    for op in control_outputs(old.op):
        add_control_inputs(op, [new.op])
    replace_tensor(old, new)


def _gather(op: tf.Operation, value: tf.Tensor) -> tf.Tensor:
    """Returns the rows of a value that an operation takes from a variable."""
    if op.type == "ResourceGatherNd":
        return tf.gather_nd(value, op.inputs[1])
    axis = op.get_attr("batch_dims")
    return tf.gather(value, op.inputs[1], axis=axis, batch_dims=axis)


def _protect(value: tf.Tensor, seen: set[tf.Operation]) -> None:
    """Gives a copy to operations that may write into the memory of a value, or pass slices on."""
    for op in value.consumers():
        if op in seen or _NEW_MEMORY.fullmatch(op.type):
            continue
        seen.add(op)
        if _SAME_MEMORY.fullmatch(op.type):
            # a GPU has memory of its own
            if tf.DeviceSpec.from_string(op.device).device_type != "GPU":
                for output in op.outputs:
                    _protect(output, seen)
            continue
        with tf.device(value.device):
            copy = tf.raw_ops.DeepCopy(x=value)
        replace_inputs(op, value, copy)
