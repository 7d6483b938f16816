"""Checks that a graph changes global_step, and that all reads of it in a step come first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import tensorflow as tf

from estimator_ext._tf_private import (
    add_control_inputs,
    control_flow_context,
    is_reference,
)
from estimator_ext.graphs.walks import done, operations_before, runs_after, users, uses, walk

_CHANGES = re.compile(r"Assign|(Resource)?(Scatter|CountUpTo|StridedSliceAssign)")


class GlobalStepCheckHook(tf.compat.v1.train.SessionRunHook):
    """Refuses a training whose graph never changes global_step.

    It must be the last of all hooks, as others may add operations when they begin.
    """

    def __init__(self, global_step: tf.Variable) -> None:
        self._global_step = global_step

    def begin(self) -> None:
        """Checks the graph, which is complete except for the saver."""
        if next(changes(self._global_step), None) is None:
            raise ValueError(
                "global_step would stay as it is for ever: no operation of the training changes "
                "it, so neither a number of steps nor a checkpoint would ever come. Give it to "
                "the optimizer, as in optimizer.minimize(loss, global_step=tf.compat.v1.train."
                "get_global_step()) or apply_gradients(..., global_step=...), or return an "
                "estimator_ext.EstimatorSpec with a host_call, which increments it by itself"
            )


def read_global_step(session: tf.compat.v1.Session) -> int:
    """Returns the global step now."""
    return int(session.run(tf.compat.v1.train.get_global_step()))


def read_before_changes(targets: Sequence[tf.Operation]) -> None:
    """Makes updates of global_step wait for all operations of a step that read it.

    A model_fn may group `global_step.assign(global_step + 1)` with its update, as BERT does. The
    learning rate might then use the old or the new value, and another one on each rank. The reads
    may be in a branch, a loop or a function.
    """
    variable = tf.compat.v1.train.get_global_step()
    in_step = operations_before(targets)
    used = {op: taken for op, taken in users(variable.op.outputs[0]) if op in in_step}
    updates = [op for op, taken in used.items() if any(_is_change(*u) for u in uses(op, taken))]
    reads = [op for op in used if op not in updates]
    for update in (op for op in updates if control_flow_context(op) is None):
        already = operations_before([update])
        ends = [end for op in reads if op not in already for end in _ends(op) if end in in_step]
        before = [op for op in dict.fromkeys(ends) if update not in operations_before([op])]
        add_control_inputs(update, [done(op) for op in before if op not in already])


def _ends(read: tf.Operation) -> list[tf.Operation]:
    """Returns the operations after a read that are outside branches and loops of TensorFlow 1."""

    def is_outside(op: tf.Operation) -> bool:
        context = control_flow_context(op)
        if op.type in ("Exit", "RefExit"):  # the last operation of a loop belongs to it
            context = context.outer_context
        return context is None

    after = walk([read], lambda op: [] if is_outside(op) else runs_after(op))
    return [op for op in after if is_outside(op)]


def changes(variable: tf.Variable) -> Iterator[tf.Operation]:
    """Yields operations that change a variable, except those that initialize or restore it."""
    initializers = {variable.initializer.name, f"{variable.op.name}/Assign"}
    for user, taken in users(variable.op.outputs[0]):
        for op, changed in uses(user, taken):
            if _is_change(op, changed) and op.name not in initializers and not _restores(op):
                yield op


def _is_change(op: tf.Operation, taken: tf.Tensor) -> bool:
    """Returns True if an operation changes what it takes, which may also be an assigned value."""
    is_variable = taken.dtype == tf.resource or is_reference(taken)
    is_changing = _CHANGES.match(op.type) is not None
    return is_variable and is_changing and op.inputs[0].name == taken.name


def _restores(op: tf.Operation) -> bool:
    """Returns True if an operation assigns a value that is read from a checkpoint."""
    sources = [tensor.op for tensor in op.inputs[1:]]
    sources += [tensor.op for source in sources for tensor in source.inputs]
    return any(source.type.startswith("Restore") for source in sources)
