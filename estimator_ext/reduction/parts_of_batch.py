"""Refuses gradients of parts of a batch that are changed one by one, such as clipped.

A program may compute a gradient for each example or micro-batch, clip each of them, and add them
up, as DP-SGD does. The mean over the ranks of their first parts, clipped, is not what one process
computes, which clips each part of each rank. If the parts are only added up, all is well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext.graphs.fingerprint import Updates
from estimator_ext.graphs.walks import data_before, walk
from estimator_ext.reduction.gradient_marks import Mark, marks_of_graph
from estimator_ext.reduction.linear_gradients import LinearGradients
from hostopt.tensorflow.sparse import parts_of

# Operations that select examples: the inputs with the values, and with what must be constant.
_SELECTING = {
    "Gather": (0, (1,)),
    "GatherV2": (0, (1, 2)),
    "Slice": (0, (1, 2)),
    "Split": (1, (0,)),
    "SplitV": (0, (1, 2)),
    "StridedSlice": (0, (1,)),
    "Unpack": (0, ()),
}


def refuse_changed_parts(
    updates: Updates, marks: Mapping[Mark, Collection[str]], linear: LinearGradients
) -> None:
    """Checks that the gradients of parts of a batch are added up before anything else.

    Args:
      updates: those of a step.
      marks: the gradients that will be reduced, with the variables that they update.
    """
    by_source: dict[str | None, list[Mark]] = {}
    for mark in marks:
        by_source.setdefault(updates.variable_of(mark.source.op), []).append(mark)
    for source, found in by_source.items():
        parts = _of_parts(updates, found) if len(found) > 1 else []
        if not parts:
            continue
        changes = [op for name in marks[parts[0]] for op in updates.varying.get(name, ())]
        used = set(walk(changes, data_before))
        for mark in parts:
            if not _is_added_first(mark, set(parts), used, linear):
                raise hostopt.ConfigError(
                    f"{len(parts)} gradients of {source!r}, each of a part of the batch, are "
                    "clipped or changed in another way before they are added up. So they cannot "
                    "be reduced: train this program in one process"
                )


def _of_parts(updates: Updates, marks: Iterable[Mark]) -> list[Mark]:
    """Returns the gradients of losses that select examples from a tensor that others share."""
    selected = {mark: _selected(mark.targets) for mark in marks}
    counts = Counter(tensor.ref() for tensors in selected.values() for tensor in tensors)
    return [
        mark
        for mark, tensors in selected.items()
        if any(counts[each.ref()] > 1 and not updates.is_same(each) for each in tensors)
    ]


def _selected(targets: Iterable[tf.Operation]) -> list[tf.Tensor]:
    """Returns the tensors from which losses take examples by constant positions."""
    marks = marks_of_graph()
    found = []
    for op in walk(targets, lambda op: [] if op in marks else data_before(op)):
        value, constants = _SELECTING.get(op.type, (0, ()))
        if op.type in _SELECTING and not op.inputs[value].op.type.startswith("Shape"):
            numbers = [tf.get_static_value(op.inputs[index]) for index in constants]
            if all(number is not None for number in numbers) and _is_of_rows(op, numbers):
                found.append(op.inputs[value])
    return list({tensor.ref(): tensor for tensor in found}.values())


def _is_of_rows(op: tf.Operation, numbers: Sequence[Any]) -> bool:
    """Returns True if an operation selects along the first dimension."""
    if op.type == "Gather":
        return True
    if op.type == "Unpack":
        return bool(op.get_attr("axis") == 0)
    if op.type == "Slice":
        return bool(numbers[0][0] != 0 or numbers[1][0] != -1)
    if op.type == "StridedSlice":
        takes_all = op.get_attr("begin_mask") & op.get_attr("end_mask")
        return not (takes_all | op.get_attr("ellipsis_mask") | op.get_attr("new_axis_mask")) & 1
    return bool(numbers[-1] == 0)  # the dimension


def _is_added_first(
    mark: Mark, parts: set[Mark], used: Collection[tf.Operation], linear: LinearGradients
) -> bool:
    """Returns True if a gradient meets all other parts before it is changed."""
    todo = list(parts_of(mark.gradient))
    while todo:
        tensor = todo.pop()
        terms = linear.terms(tensor)
        if terms is None:
            return False
        if not parts <= terms.keys():
            todo += [op.outputs[0] for op in tensor.consumers() if op in used and op.outputs]
    return True
