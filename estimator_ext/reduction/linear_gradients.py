"""Finds gradients that a loop, a branch or a function computes and at most adds up.

Such a result is a linear function of gradients, with factors that are the same on all ranks. So
its mean over the ranks is the result of the means, and it can be reduced like a gradient. A result
that is not linear, or to which anything else is added, as noise or clipping by a norm, is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

from estimator_ext.graphs.operation_kinds import ADDING, depends_on_more, takes_handle
from estimator_ext.graphs.walks import (
    BRANCHES,
    CALLS,
    LOOPS,
    data_before,
    original_functions,
    parameters,
    walk,
)
from estimator_ext.reduction.gradient_marks import Mark

_PASSING = ("Identity", "Neg", "Cast", "Reshape", "EnsureShape", "StopGradient", "Snapshot")

Marks = dict[Mark, None]


@dataclass
class LinearGradients:
    """The results of calls that are linear in gradients."""

    marks: Mapping[tf.Operation, Mark]
    is_same: Callable[[tf.Tensor], bool]
    _graph: tf.Graph = field(default_factory=tf.compat.v1.get_default_graph)
    _found: dict[Any, Mark | None] = field(default_factory=dict)
    _passed: dict[tf.Operation, tf.Tensor] = field(default_factory=dict)  # by argument
    # by argument of the body of a loop: its number, and the numbers of those to be followed
    _carried: dict[tf.Operation, tuple[int, list[int]]] = field(default_factory=dict)

    def mark_of(self, tensor: tf.Tensor) -> Mark | None:
        """Returns the mark of a result of a call that can be reduced like a gradient, or None."""
        if tensor.op.type not in CALLS or not tensor.dtype.is_floating:
            return None
        if tensor.ref() not in self._found:
            self._found[tensor.ref()] = self._mark_of(tensor)
        return self._found[tensor.ref()]

    def _mark_of(self, tensor: tf.Tensor) -> Mark | None:
        marks = list(self._terms(tensor) or {})
        if not marks or not all(map(self._can_reduce, marks)):
            return None
        kinds = {(mark.loss.is_sum, mark.loss.problem, mark.is_scaled) for mark in marks}
        if len(kinds) > 1:
            return None
        first = marks[0]
        name = f"{tensor.op.name}:{tensor.value_index}"
        targets = tuple(op for mark in marks for op in mark.targets)
        return replace(first, gradient=tensor, name=name, targets=targets)

    def _can_reduce(self, mark: Mark) -> bool:
        is_dense = isinstance(mark.gradient, tf.Tensor)
        return is_dense and (mark.source.dtype == tf.resource or self.is_same(mark.source))

    def _terms(self, tensor: tf.Tensor) -> Marks | None:
        """Returns the gradients of which a tensor is a linear function; None if it is not."""
        op = tensor.op
        if op in self.marks:
            return {self.marks[op]: None}
        if op in self._carried:
            number, followed = self._carried[op]
            followed.append(number)
            return {}
        if op in self._passed:
            return self._terms(self._passed[op])
        if _is_zero(tensor):
            return {}
        if op.type in ADDING:
            return _union(self._terms(each) for each in op.inputs)
        if op.type in _PASSING:
            return self._terms(op.inputs[0])
        if op.type in ("Mul", "RealDiv") and self._is_factor(op.inputs[1]):
            return self._terms(op.inputs[0])
        if op.type == "Mul" and self._is_factor(op.inputs[0]):
            return self._terms(op.inputs[1])
        if op.type in LOOPS:
            return self._terms_of_loop(op, tensor.value_index)
        if op.type in CALLS:
            return self._terms_of_call(op, tensor.value_index)
        return None

    def _is_factor(self, tensor: tf.Tensor) -> bool:
        """Returns True if a tensor, also one in a function, has one value on all ranks."""

        def before(op: tf.Operation) -> list[tf.Operation]:
            return [] if op.graph is self._graph else data_before(op)

        return all(map(self._is_same_on_all, walk([tensor.op], before)))

    def _is_same_on_all(self, op: tf.Operation) -> bool:
        if op.graph is self._graph:
            return all(map(self.is_same, op.outputs))
        if op in self._passed:
            return self._is_factor(self._passed[op])
        if op in self._carried or op in self.marks or op.type in (*CALLS, "Placeholder"):
            return False
        return takes_handle(op) or not depends_on_more(op)

    def _terms_of_call(self, op: tf.Operation, index: int) -> Marks | None:
        if op.type in BRANCHES and not self.is_same(op.inputs[0]):
            return None
        terms = []
        for _, body in original_functions(op):
            self._passed.update((each.op, passed) for each, passed in parameters(op, body))
            terms.append(self._terms(body.outputs[index]))
        return _union(terms)

    def _terms_of_loop(self, op: tf.Operation, index: int) -> Marks | None:
        """Follows the variables of a loop, each of which may be added to others."""
        if not any(map(self.is_same, op.outputs)):  # its condition may differ
            return None
        body = dict(original_functions(op))["body"]
        todo, done = [index], set()
        self._carried.update((a.op, (i, todo)) for i, a in enumerate(body.inputs))
        terms = []
        while todo:
            number = todo.pop()
            if number not in done:
                done.add(number)
                terms += [self._terms(op.inputs[number]), self._terms(body.outputs[number])]
        return _union(terms)


def _union(terms: Any) -> Marks | None:
    result: Marks = {}
    for each in terms:
        if each is None:
            return None
        result.update(each)
    return result


def _is_zero(tensor: tf.Tensor) -> bool:
    if tensor.op.type == "ZerosLike":
        return True
    value = tf.get_static_value(tensor)
    return value is not None and not np.any(value)
