"""Gradients that are reduced already, or are computed from such: a second sum would be wrong."""

from __future__ import annotations

import enum
import functools
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hostopt.tensorflow.sparse import values_of


class Origin(enum.Flag):
    """Kinds of data that a tensor is computed from, except numbers and applied variables."""

    NOTHING = 0
    REDUCED = enum.auto()  # results of reductions over the ranks
    LOCAL = enum.auto()  # data of this rank
    STORED = enum.auto()  # variables like sums of gradients, which may be either


_reduced: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()  # by graph
_reduced_eagerly: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id

# Stateful operations whose results depend on their inputs only.
_PASS_ON = ("CheckNumerics", "CheckNumericsV2", "Print", "PrintV2")
_READS = ("ReadVariableOp", "VariableV2", "VarHandleOp")


def mark(gradients: Sequence[Any]) -> None:
    """Notes that gradients are reduced."""
    for each in gradients:
        if each is None:
            continue
        tensor = values_of(each)
        if _graph_of(tensor) is None:
            _reduced_eagerly[id(tensor)] = tensor
        else:
            _reduced.setdefault(tensor.graph, set()).add(tensor.op.name)


def origins_of(grads_and_vars: Sequence[tuple[Any, Any]]) -> dict[int, Origin]:
    """Returns what gradients that are not None are computed from, by position.

    Gradients of graphs are followed to their origins; of others it is only known if they are
    reduced themselves.
    """
    search = _Search([variable for _, variable in grads_and_vars])
    origins = {}
    for i, (gradient, _) in enumerate(grads_and_vars):
        if gradient is not None:
            tensor = values_of(gradient)
            unknown = Origin.NOTHING if _graph_of(tensor) is not None else Origin.LOCAL
            origins[i] = search.origin_of(tensor) or unknown
    return origins


class _Search:
    """Follows tensors of graphs to their origins, through each operation once.

    The values of `variables` are the same on all ranks.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        handles = [getattr(each, "handle", None) for each in variables]
        tensors = [v.op.outputs[0] if h is None else h for v, h in zip(variables, handles)]
        self._variables = {_key(outside(tensor)) for tensor in tensors}
        self._shapes = [tf.TensorShape(each.shape) for each in variables]
        self._known: dict[Any, Origin] = {}

    def origin_of(self, tensor: Any) -> Origin:
        steps: list[tuple[Any, list[Any] | None]] = [(tensor, None)]
        while steps:
            each, inputs = steps.pop()
            key = _key(each)
            if inputs is not None:  # their origins are known by now
                origins = [self._known[_key(x)] for x in inputs]
                self._known[key] = functools.reduce(operator.or_, origins, self._known[key])
            elif key not in self._known:
                self._known[key], inputs = self._own_origin(each)  # for loops of operations, too
                steps.append((each, inputs))
                steps.extend((x, None) for x in inputs)
        return self._known[_key(tensor)]

    def _own_origin(self, tensor: Any) -> tuple[Origin, list[Any]]:
        """Returns the origin that a tensor has by itself, and the tensors that may have others."""
        graph = _graph_of(tensor)
        if graph is None:  # in a function that captures it, a constant
            is_reduced = _reduced_eagerly.get(id(tensor)) is tensor
            return (Origin.REDUCED if is_reduced else Origin.NOTHING), []
        op = tensor.op
        if op.name in _reduced.get(graph, ()):
            return Origin.REDUCED, []
        made = outside(tensor)
        if made is not tensor:
            return Origin.NOTHING, [made]
        if op.type in _READS:
            return self._of_variable(op, tensor), []
        inputs = list(op.inputs)
        is_number = op.type == "Const" and not (tensor.dtype.is_floating and tensor.shape.rank)
        is_source = not inputs and not is_number  # an array may be data of this rank
        if is_source or (op.op_def.is_stateful and op.type not in _PASS_ON):
            return Origin.LOCAL, inputs
        return Origin.NOTHING, inputs

    def _of_variable(self, op: Any, value: Any) -> Origin:
        handle = op.inputs[0] if op.type == "ReadVariableOp" else op.outputs[0]
        if _key(outside(handle)) in self._variables or not value.dtype.is_floating:
            return Origin.NOTHING
        return Origin.STORED if value.shape in self._shapes else Origin.NOTHING


def _graph_of(tensor: Any) -> Any:
    """Returns the graph of a tensor; None for one that has a value."""
    return getattr(tensor, "graph", None)


def _key(tensor: Any) -> Any:
    graph = _graph_of(tensor)
    return id(tensor) if graph is None else (id(graph), tensor.op.name)


def outside(tensor: Any) -> Any:
    """Returns a tensor where it is made, outside of the functions that capture it."""
    while _graph_of(tensor) is not None and tensor.op.type == "Placeholder":
        captures = getattr(tensor.graph, "captures", ())
        found = [external for external, inside in captures if inside.op.name == tensor.op.name]
        if not found:
            break
        (tensor,) = found
    return tensor
