"""Refuses gradients of parts of a batch that are changed one by one, such as clipped.

A program may compute a gradient for each example or micro-batch, clip each of them, and add them
up, as DP-SGD does. The mean over the ranks of their first parts, clipped, is not what one process
computes, which clips each part of each rank. If the parts are only added up, all is well.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext.graphs.fingerprint import Updates
from estimator_ext.graphs.operation_kinds import ADDING, PRODUCTS, QUOTIENTS, takes_handle
from estimator_ext.graphs.walks import data_before, walk
from estimator_ext.losses.reader import LossReader
from estimator_ext.reduction.gradient_marks import Mark, marks_of_graph
from hostopt.tensorflow.sparse import values_of

# Operations that select examples: the inputs with the values, and with what must be constant, of
# which the last one says the dimension, except for slices.
_SELECTING = {
    "Gather": (0, (1,)),
    "GatherV2": (0, (1, 2)),
    "Slice": (0, (1, 2)),
    "Split": (1, (0,)),
    "SplitV": (0, (1, 2)),
    "StridedSlice": (0, (1, 3)),
    "Unpack": (0, ()),
}
_LINEAR: tuple[str, ...] = (*ADDING, "Neg", "Identity", "Cast", "Reshape", "Squeeze", "ExpandDims")
_LINEAR += ("EnsureShape", "StopGradient", "Pack", "ConcatV2", "Sum", "Mean", "UnsortedSegmentSum")


def refuse_changed_parts(
    updates: Updates, data: Collection[tf.Operation], marks: Iterable[Mark], size: int
) -> None:
    """Checks that gradients of parts of a batch, which will be reduced, are first added up."""
    by_source: dict[str | None, list[Mark]] = {}
    for mark in marks:
        by_source.setdefault(updates.variable_of(mark.source.op), []).append(mark)
    reader = LossReader(data, {}, marks_of_graph(), size)
    selected = functools.cache(functools.partial(_selected, reader))  # by targets
    changes = [op for operations in updates.varying.values() for op in operations]
    used: set[tf.Operation] = set()
    for source, found in by_source.items():
        if len(found) == 1:
            continue
        # of losses that select examples from a tensor that others share
        counts = Counter(each for mark in found for each in selected(mark.targets))
        parts = [mark for mark in found if any(counts[e] > 1 for e in selected(mark.targets))]
        used = used or set(walk(changes if parts else [], data_before))
        operations = {values_of(mark.gradient).op for mark in parts}
        if any(_is_changed(values_of(mark.gradient), operations, used, updates) for mark in parts):
            raise hostopt.ConfigError(
                f"{len(parts)} gradients of {source!r}, each of a part of the batch, are clipped "
                "or changed in another way before they are added up. So they cannot be reduced: "
                "train this program in one process"
            )


def _selected(reader: LossReader, targets: Iterable[tf.Operation]) -> set[Any]:
    """Returns the tensors from which losses take examples by constant positions."""
    found = set()
    for op in walk(targets, lambda op: [] if op in reader.gradients else data_before(op)):
        value, constants = _SELECTING.get(op.type, (0, ()))
        if op.type in _SELECTING and not op.inputs[value].op.type.startswith("Shape"):
            numbers = [tf.get_static_value(op.inputs[index]) for index in constants]
            is_constant = all(number is not None for number in numbers)
            tensor = op.inputs[value]
            if is_constant and _is_of_rows(op, numbers) and _has_examples(reader, tensor):
                found.add(tensor.ref())
    return found


def _is_of_rows(op: tf.Operation, numbers: Sequence[Any]) -> bool:
    """Returns True if an operation selects along the first dimension."""
    if op.type == "Gather":
        return True
    if op.type == "Unpack":
        return bool(op.get_attr("axis") == 0)
    if op.type == "Slice":
        return bool(numbers[0][0] != 0 or numbers[1][0] != -1)
    if op.type == "StridedSlice":
        others = op.get_attr("ellipsis_mask") | op.get_attr("new_axis_mask")
        takes_all = op.get_attr("begin_mask") & op.get_attr("end_mask") & 1
        return not (others & 1 or (takes_all and numbers[1][0] == 1))
    rank = op.outputs[0].shape.rank or 1
    return bool(numbers[-1] % rank == 0)


def _has_examples(reader: LossReader, tensor: tf.Tensor) -> bool:
    """Returns True if the first dimension may count examples, or groups of examples."""
    reader.read([tensor])
    axis = reader.value(tensor).axis
    length = tensor.shape[0] if tensor.shape.rank else 1
    if axis is None or length == 1:
        return False
    return axis == 0 or any(n % length == 0 for n in reader.batch.lengths)


def _is_changed(
    gradient: tf.Tensor,
    parts: Collection[tf.Operation],
    used: Collection[tf.Operation],
    updates: Updates,
) -> bool:
    """Returns True if a gradient is changed before it meets the gradient of another part."""
    todo = [gradient]
    while todo:
        tensor = todo.pop()
        for op in tensor.consumers():
            if op not in used or takes_handle(op):
                continue
            before = walk([op], lambda each: [] if each in parts else data_before(each))
            if any(each in parts and each is not gradient.op for each in before):
                continue
            others = [each for each in op.inputs if each.ref() != tensor.ref()]
            is_scaled = op.type in (*PRODUCTS, *QUOTIENTS) and all(map(updates.is_same, others))
            is_scaled = is_scaled and len(others) == 1
            if not (is_scaled or op.type in _LINEAR):
                return True
            todo += op.outputs
    return False
