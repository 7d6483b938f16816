"""Devices of the operations of a step.

A program builds all of its step in the part of the accelerator, and only updates by kernels of
TensorFlow are on the host from the start, beside their variables. These operations move there:

[H1] what is computed from sums of gradients or from slots, such as clipped gradients or the update
     of an optimizer that is written in Python. Otherwise sums and slots would travel to the
     accelerator and back, and all slots would be in its memory during the step;
[H2] scalars that are computed for the host from constants and scalars, such as learning rates.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence, Set

import tensorflow as tf

from estimator_ext._tf_private import control_flow_context, is_reference, set_device
from estimator_ext.graphs.walks import CALLS, data_after, data_before, users, walk
from hostopt.tensorflow.background import HOST_DEVICE


def is_on(op: tf.Operation, device: str) -> bool:
    """Returns True if an operation has a device, whose name may leave out the job."""
    return _short(op.device) == _short(device)


def move_updates(
    targets: Sequence[tf.Operation],
    losses: Iterable[tf.Tensor],
    sums: Iterable[tf.Tensor],
    device: str,
) -> None:
    """Moves operations of a step that belong to updates from an accelerator to the host.

    Args:
      targets: of the step.
      losses: which are reported or differentiated. What they are computed from belongs to forward.
      sums: of gradients.
      device: the accelerator.
    """
    if _short(device) == _short(HOST_DEVICE):
        return
    step, forward = walk(targets), set(walk([loss.op for loss in losses], data_before))
    candidates = {op for op in step if is_on(op, device) and _can_move(op, device)}
    sources = [*sums, *_slots(forward)]
    updates = set(walk([op for each in sources for op in each.consumers()], data_after))  # [H1]
    for op in step:
        if _is_scalar(op) and candidates.isdisjoint({e.op for e in op.inputs} - updates):
            updates.add(op)  # [H2]
    moved: set[tf.Operation] = set()
    for op in reversed(step):  # what the accelerator reads stays there
        is_read = any(is_on(each, device) and each not in moved for each in data_after(op))
        if op in candidates and op in updates and not is_read:
            moved.add(op)
    places = {f"loc:@{op.name}".encode() for op in moved}
    for op in targets[0].graph.get_operations() if moved else ():
        if op in moved:
            set_device(op, HOST_DEVICE)
        elif not places.isdisjoint(op.colocation_groups()):
            set_device(op, op.device)


def _slots(forward: Set[tf.Operation]) -> Iterator[tf.Tensor]:
    """Yields values of variables that are as large as a trained one, unless forward reads them."""
    shapes = {str(v.shape) for v in tf.compat.v1.trainable_variables() if v.shape.rank}
    for variable in tf.compat.v1.global_variables():
        handle = getattr(variable, "handle", None)  # a reference variable has none
        if handle is None or variable.trainable or str(variable.shape) not in shapes:
            continue
        reads = [op for op, _ in users(handle) if op.type == "ReadVariableOp"]
        if forward.isdisjoint(reads):
            yield from (op.outputs[0] for op in reads)


def _is_scalar(op: tf.Operation) -> bool:
    return bool(op.outputs) and all(each.shape.rank == 0 for each in (*op.inputs, *op.outputs))


def _can_move(op: tf.Operation, device: str) -> bool:
    """Returns False for control flow, and for what must be on a device with its resources."""
    if control_flow_context(op) is not None or op.type in CALLS:
        return False
    return not any(
        is_on(each.op, device) and (each.dtype in (tf.resource, tf.variant) or is_reference(each))
        for each in op.inputs
    )


@functools.cache
def _short(device: str) -> tuple[str | None, int | None]:
    spec = tf.DeviceSpec.from_string(device)
    return spec.device_type, spec.device_index
