"""Who changes global_step in a graph, and when: never, and a training never ends; or too early."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from estimator_ext.graph import functions_called, operations_before

__all__: list[str] = []

_CHANGES = re.compile(r"Assign|(Resource)?(Scatter|CountUpTo|StridedSliceAssign)")
# Pass a variable on as it is, in the control flow of TensorFlow 1 too.
_PASSING = re.compile(r"(Ref)?(Identity|IdentityN|Switch|Enter|Merge|NextIteration|Exit)$")


class GlobalStepCheckHook(tf.compat.v1.train.SessionRunHook):
    """Refuses a training whose graph never changes global_step; the last of all hooks.

    Other hooks may add what changes it when they begin.

    Args:
      global_step: that of the training.
    """

    def __init__(self, global_step: tf.Variable) -> None:
        self._global_step = global_step

    def begin(self) -> None:
        """Look at the graph, which is complete but for the saver.

        Raises:
          ValueError: nothing changes global_step.
        """
        if next(changes(self._global_step), None) is None:
            raise ValueError(
                "global_step would stay as it is for ever: no operation of the training changes "
                "it, so neither a number of steps nor a checkpoint would ever come. Give it to "
                "the optimizer, as in optimizer.minimize(loss, global_step=tf.compat.v1.train."
                "get_global_step()) or apply_gradients(..., global_step=...), or return an "
                "estimator_ext.EstimatorSpec with a host_call, which increments it by itself"
            )


def read_before_changes(targets: Sequence[tf.Operation]) -> None:
    """Has global_step change only when what reads it in a step has done so.

    A model_fn may group `global_step.assign(global_step + 1)` with its update, as BERT's does. The
    learning rate may then be that of this step or of the next one, another on each rank. It may be
    read in a branch, a loop or a function, too.

    Args:
      targets: what runs in a step, in the default graph.
    """
    variable = tf.compat.v1.train.get_global_step()
    if variable is None:
        return
    in_step = operations_before(targets)
    users = [op for op in _users(_tensor_of(variable)) if op in in_step]
    updates = [op for op in users if _changes_within(op)]
    reads = [op for op in users if op not in updates]
    for update in (op for op in updates if op._get_control_flow_context() is None):
        already = operations_before([update])
        ends = [end for op in reads if op not in already for end in _ends(op) if end in in_step]
        before = [op for op in dict.fromkeys(ends) if update not in operations_before([op])]
        update._add_control_inputs([_done(op) for op in before if op not in already])


def _done(op: tf.Operation) -> tf.Operation:
    """What runs after an operation; what a branch computes may be done later than the branch."""
    if op.outputs and any(True for _ in functions_called(op)):
        with tf.control_dependencies(None), tf.device(op.device):
            return tf.raw_ops.IdentityN(input=op.outputs)[0].op
    return op


def _tensor_of(variable: tf.Variable) -> tf.Tensor:
    """The resource or the reference that operations have as their input."""
    handle = getattr(variable, "handle", None)
    return variable.op.outputs[0] if handle is None else handle


def _users(tensor: tf.Tensor) -> Iterator[tf.Operation]:
    """Operations that read or change a variable, or call a function that may."""
    for op in tensor.consumers():
        if _PASSING.match(op.type):
            for output in op.outputs:
                yield from _users(output)
        else:
            yield op


def _changes_within(op: tf.Operation) -> bool:
    """Whether an operation changes global_step, or calls a function that does."""
    step = _tensor_of(tf.compat.v1.train.get_global_step())
    if _CHANGES.match(op.type):
        changed = op.inputs[0]
        while _PASSING.match(changed.op.type):
            changed = changed.op.inputs[0]
        return bool(changed.op is step.op)  # and is not given its value
    arguments = _arguments_of(op, step)
    return any(True for argument in arguments for _ in _changes_of(argument, set()))


def _ends(read: tf.Operation) -> list[tf.Operation]:
    """Operations outside of branches and loops of TensorFlow 1 that run after a read in them."""
    found, seen, todo = [], {read}, [read]
    while todo:
        op = todo.pop()
        context = op._get_control_flow_context()
        if op.type in ("Exit", "RefExit"):  # the last operation of a loop
            context = context.outer_context
        if context is None:
            found.append(op)
            continue
        after = {user for output in op.outputs for user in output.consumers()}
        after = (after | set(op._control_outputs)) - seen
        seen |= after
        todo += after
    return found


def changes(variable: tf.Variable) -> Iterator[tf.Operation]:
    """Operations that change a variable, also within functions, branches and loops.

    Args:
      variable: of the default graph, a resource or a reference variable.

    Yields:
      Each of them, but for those that initialise or restore the variable.
    """
    own = {variable.initializer.name, f"{variable.op.name}/Assign"}
    for op in _changes_of(_tensor_of(variable), set()):
        if op.name not in own and not _restores(op):
            yield op


def _changes_of(tensor: tf.Tensor, seen: set[Any]) -> Iterator[tf.Operation]:
    if not _is_variable(tensor) or tensor.ref() in seen:  # a value, or once more in a loop
        return
    seen.add(tensor.ref())
    for op in tensor.consumers():
        if _CHANGES.match(op.type):
            if op.inputs[0].name == tensor.name:
                yield op
            continue
        within = op.outputs if _PASSING.match(op.type) else _arguments_of(op, tensor)
        for each in within:
            yield from _changes_of(each, seen)


def _is_variable(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype == tf.resource or tensor.dtype._is_ref_dtype)


def _arguments_of(op: tf.Operation, tensor: tf.Tensor) -> Iterator[tf.Tensor]:
    """What a tensor is called within the functions that an operation calls with it."""
    for _, body in functions_called(op):
        # the operation's first inputs may be of its own, such as which branch to take
        for given, argument in zip(reversed(op.inputs), reversed(body.inputs)):
            if given.name == tensor.name:
                yield argument


def _restores(op: tf.Operation) -> bool:
    """Whether the value that an operation assigns is read from a checkpoint."""
    sources = [tensor.op for tensor in op.inputs[1:]]
    sources += [tensor.op for source in sources for tensor in source.inputs]
    return any(source.type.startswith("Restore") for source in sources)
