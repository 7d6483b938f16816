"""Reads the degree of a loss in the number of examples, from the operations that compute it.

Each value has a degree: it grows with the number n of examples as n ** degree. The loss of one
example has degree 0, the number of examples 1, a sum over the batch 1, and a mean 0. Degrees add
up in a product, and all terms of a sum must have the same one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from estimator_ext._tf_private import constant_of
from estimator_ext.graphs.operation_kinds import (
    ADDING,
    OF_THIS_RANK,
    PRODUCTS,
    QUOTIENTS,
    VARIABLES,
)
from estimator_ext.graphs.walks import data_before, original_functions, parameters, walk
from estimator_ext.losses.batch_axis import BatchAxis
from estimator_ext.losses.nonlinear import can_weigh
from hostopt.tensorflow.ops import is_same_on_all_ranks
from hostopt.tensorflow.reduced import outside

_PASSING: tuple[str, ...] = ("Identity", "Cast", "StopGradient", "PreventGradient", "Snapshot")
_PASSING += ("PlaceholderWithDefault", "Neg", "EnsureShape", "Reshape", "Squeeze", "ExpandDims")
_PASSING += ("Switch", "RefSwitch", "Abs", "Relu", "CheckNumerics")
_REDUCTIONS = ("Sum", "Mean", "L2Loss")
_JOINING = ("Pack", "ConcatV2", "Select", "SelectV2", "Merge")
_CALLING = ("PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf")
_OF_TENSORS = (*_PASSING, *PRODUCTS, *QUOTIENTS, *_REDUCTIONS, *_JOINING, *_CALLING)
# followed in scalars only
_LARGER = ("Maximum", "Minimum")
_CURVES: tuple[str, ...] = ("Sqrt", "Rsqrt", "Square", "Log", "Log1p", "Exp", "Tanh", "Sigmoid")
_CURVES += ("Softplus", "Pow", "Reciprocal", "Inv")
_COUNTS = ("Size", "StridedSlice", "Prod")
# whatever the values are
_OF_SHAPES = ("Shape", "ShapeN", "Size", "OnesLike", "ZerosLike", "Range")
_SELECTING = ("Gather", "GatherV2", "GatherNd", "DynamicPartition")
# of as many elements as their inputs along the first dimension
_OF_ROWS: tuple[str, ...] = (*_OF_TENSORS, *ADDING, *_LARGER, *_CURVES, "SquaredDifference")
_OF_ROWS += ("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits", "LogSoftmax")
_OF_ROWS += ("Softmax", "MatMul", "BatchMatMulV2", "BiasAdd", "Max", "Min", "OneHot", "Xlogy")
_OF_SCALARS = (*ADDING, *_LARGER, *_CURVES, *_COUNTS)
_POWERS = {"Square": 2, "Reciprocal": -1, "Inv": -1}
_MAX_SUMS = 64  # each layer of a deep graph may double them

CURE = "Say what it is with `python -m estimator_ext --loss mean` or `--loss sum`"
OF_BOTH = (
    "adds terms that are means over the batch and terms that are sums, of which no reduction over "
    "the ranks makes the loss of one process"
)
CURE_OF_BOTH = "Divide the sums by the number of examples, as tf.shape(labels)[0] returns it"
OF_DIMENSIONS = (
    "is a mean over one dimension and a sum over another, and by its size either may count the "
    "examples"
)


class Sum(NamedTuple):
    """A sum over examples."""

    terms: int = 0  # number of the elements that are added up; 0 if it is not static
    constants: frozenset[float] = frozenset()  # absolute factors, but 1; NaN if not known

    def times(self, number: float) -> Sum:
        """Returns the sum with one more factor."""
        return self if number == 1 else Sum(self.terms, self.constants | {number})


@dataclass(frozen=True)
class Value:
    """The degree of a tensor, and what else is known of it."""

    degree: float | None = 0  # None if not known
    axis: int | None = None  # its dimension of examples
    has_data: bool = False
    has_variables: bool = False
    sums: frozenset[Sum] = frozenset()  # that it is made of
    by: str = ""  # the operation that reduced it over the examples, or that hides how
    problem: tuple[str, str] | tuple[()] = ()  # if it is neither mean nor sum, and the remedy
    penalties: tuple[tuple[tf.Operation, int], ...] = ()  # inputs of additions without data
    # "Sum" or "Mean" if it is reduced so over another dimension that may count the examples
    other: str = ""
    # operations that are not linear in numbers which depend on the values of this rank's data, as
    # a quotient by one, or its root
    nonlinear: tuple[tf.Operation, ...] = ()
    is_exact: bool = True  # False if weights of them do not make it that of one process


def joined(values: Iterable[Value]) -> Value:
    """Returns the value of a sum, or of a choice, of values."""
    values = list(values)
    data = [each for each in values if each.has_data]
    if not data:
        return Value(has_variables=any(each.has_variables for each in values))
    problems = [each.problem for each in data if each.problem]
    degrees = {each.degree for each in data}
    by = next((each.by for each in data if each.degree != 0), data[0].by)
    if len(degrees) > 1 and degrees != {0, None} and not problems:
        problems.append((f"{OF_BOTH} ({by})", CURE_OF_BOTH))
    axes = [each.axis for each in data if each.axis is not None]
    return Value(
        None if None in degrees else data[0].degree,
        axes[0] if axes else None,
        True,
        any(each.has_variables for each in values),
        _few(frozenset().union(*(each.sums for each in data))),
        by,
        problems[0] if problems else (),
        _each_once(each.penalties for each in data),
        nonlinear=_each_once(each.nonlinear for each in data),
        is_exact=all(each.is_exact for each in data),
    )


def _few(sums: frozenset[Sum]) -> frozenset[Sum]:
    """Returns the sums, or one that is not known if a long chain has made too many."""
    return sums if len(sums) <= _MAX_SUMS else frozenset({Sum(0, frozenset({math.nan}))})


def _each_once(parts: Iterable[Iterable[Any]]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(itertools.chain.from_iterable(parts)))


def added(op: tf.Operation, values: Sequence[Value]) -> Value:
    """Returns the value of an addition, with the penalties among its inputs."""
    value = joined(values)
    if not value.degree:
        return value
    found = [i for i, v in enumerate(values) if not v.has_data and v.has_variables]
    penalties = tuple((op, index) for index in found)
    return replace(value, penalties=(*value.penalties, *penalties))


def unweighted(value: Value) -> Value:
    """Returns the value of a function that is not linear, which no earlier weight passes."""
    return replace(value, is_exact=value.is_exact and not value.nonlinear)


def function_of_sum(kind: str, value: Value) -> Value:
    """Returns the value of a power, or of another function, of a sum over the batch."""
    if kind in _POWERS and value.degree:
        return replace(value, degree=_POWERS[kind] * value.degree)
    text = f"is a function ({kind}) of a sum over the batch ({value.by})"
    return replace(value, degree=None, problem=value.problem or (text, CURE))


@dataclass
class LossReader:
    """Reads values from the end of a graph that computes losses, each operation once."""

    data: Collection[tf.Operation]
    reductions: Mapping[str, str]  # of loss functions, by the scope of their operations
    gradients: Mapping[tf.Operation, Any]
    size: int  # number of ranks
    said: str = ""  # "mean" or "sum" if the user says so
    weighted: bool = False  # True if batches may differ in length
    weighs: bool = True  # False if gradients cannot be weighted
    batch: BatchAxis = field(init=False)
    _values: dict[tf.Operation, Value] = field(default_factory=dict)
    _results: dict[tf.Operation, list[Value]] = field(default_factory=dict)  # of calls
    _data: dict[tf.Operation, bool] = field(default_factory=dict)
    _variables: dict[tf.Operation, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batch = BatchAxis(self.data)

    def read(self, targets: Sequence[tf.Tensor]) -> None:
        """Reads all operations that compute tensors of one graph."""
        operations = [each.op for each in targets]
        for op in walk(operations, lambda op: () if op in self._data else sources(op)):
            if op not in self._data:  # read earlier, or an argument of a function
                self._note_origin(op)
        for op in walk(operations, self._before):
            if op not in self._values and self._is_followed(op):
                self._values[op] = self._of(op)

    def _note_origin(self, op: tf.Operation) -> None:
        is_placed = op.type == "Placeholder" and op.outputs[0].dtype == tf.resource
        ends = is_same_on_all_ranks(op)
        before = [] if ends else sources(op)
        of_rank = OF_THIS_RANK.match(op.type) and not is_placed and _captured_by(op) is None
        is_data = bool(of_rank) or op in self.data or self.batch.is_length(op)
        is_data = is_data or any(self._data.get(each, False) for each in before)
        self._data[op] = is_data and not ends
        self._variables[op] = (
            op.type in VARIABLES
            or is_placed
            or any(self._variables.get(each, False) for each in before)
        )

    def _is_followed(self, op: tf.Operation) -> bool:
        if not self._data[op] or op in self.data or op in self.gradients:
            return False
        is_scalar = op.type in _OF_SCALARS and op.outputs[0].shape.rank == 0
        return is_scalar or op.type in _OF_TENSORS or _captured_by(op) is not None

    def _before(self, op: tf.Operation) -> list[tf.Operation]:
        is_end = op in self._values or not self._is_followed(op) or self._is_mean(op)
        return [] if is_end else sources(op)

    def _is_mean(self, op: tf.Operation) -> bool:
        """Returns True for the quotient in a loss function that returns a mean."""
        reduction = self.reductions.get(scope_of(op), "none")
        return op.type in QUOTIENTS and reduction not in ("none", "sum")

    # -- values -----------------------------------------------------------------------------

    def value(self, tensor: tf.Tensor) -> Value:
        """Returns what is known of a tensor that has been read."""
        op = tensor.op
        if op in self._results:
            return self._results[op][int(tensor.value_index)]
        if op in self._values:
            return self._values[op]
        if not self._data.get(op, False):
            return Value(has_variables=self._variables.get(op, False))
        if op in self.gradients:
            return self._of_gradient(op)
        return self._of_leaf(tensor)

    def _of_leaf(self, tensor: tf.Tensor) -> Value:
        """A value with a dimension of examples belongs to each example by itself."""
        axis = self.batch.of(tensor)
        by = f"{tensor.op.type} {tensor.op.name!r}"
        return Value(None if axis is None else 0, axis, True, by=by)

    def _of_gradient(self, op: tf.Operation) -> Value:
        mark = self.gradients[op]
        source, axis = mark.source, None
        if source.dtype != tf.resource and self._data.get(source.op, False):
            axis = self.batch.of(source)
        by = f"gradient {op.name!r}"
        return Value(int(mark.loss.is_sum) - (axis is not None), axis, True, by=by)

    def _of(self, op: tf.Operation) -> Value:
        kind, tensor = op.type, op.outputs[0]
        if self._is_mean(op):
            value = Value(has_data=True, by=f"loss function {scope_of(op)!r}")
            before = walk([op.inputs[0].op], sources)
            quotients = [each for each in before if each.type in QUOTIENTS]
            by_number = [each for each in quotients if each.inputs[1].shape.rank == 0]
            value = replace(value, nonlinear=tuple(filter(self._divides, by_number)))
            return self._divided(op, value) if self._divides(op) else unweighted(value)
        if kind in _CALLING:
            return self._of_call(op)
        if (source := _captured_by(op)) is not None:
            return self.value(source)
        values = [self.value(each) for each in op.inputs]
        if kind in _REDUCTIONS:
            return self._reduced(op, values[0])
        if kind in PRODUCTS or kind in QUOTIENTS:
            return self._product(op, values)
        if kind in _COUNTS:
            return self._count(op)
        if kind in ADDING:
            return added(op, values)
        if kind in _CURVES:
            return (
                function_of_sum(kind, values[0])
                if values[0].degree
                else self._function(op, values[0])
            )
        if kind in _LARGER or kind in _JOINING:
            value = joined(values[1:] if kind.startswith("Select") else values)
            if kind in _LARGER:
                value = self._function(op, value)
            elif kind.startswith("Select") and values[0].has_data:
                value = unweighted(value)
            has_axis = value.axis is not None
            return replace(value, axis=self.batch.of(tensor) if has_axis else None)
        value = values[0]  # of the same elements, perhaps in another shape
        value = self._function(op, value) if kind in ("Abs", "Relu") else value
        axis = None if value.axis is None else self.batch.of(tensor)
        is_lost = axis is None and value.axis is not None
        return replace(value, axis=axis, degree=None if is_lost else value.degree)

    def summed(self, value: Value, tensor: tf.Tensor) -> Value:
        """Returns the value of the sum of all elements of a tensor."""
        if not value.has_data or value.axis is None:
            return value
        degree = None if value.degree is None else value.degree + 1
        by = f"the gradient of all elements of {tensor.op.name!r}"
        sums = value.sums or frozenset({Sum()})
        return replace(value, degree=degree, axis=None, by=by, sums=sums)

    def _reduced(self, op: tf.Operation, value: Value) -> Value:
        kind, by = "Mean" if op.type == "Mean" else "Sum", f"{op.type} {op.name!r}"
        axes = _axes(op)
        shape = op.inputs[0].shape.as_list() if axes is not None else []
        candidates = set(self.batch.candidates(op.inputs[0])) if shape else set()
        if value.axis is None:  # a sum over one of two dimensions, then a mean over the other
            value = self._function(op, value) if op.type == "L2Loss" else value
            is_unclear = value.other == "Sum" and kind == "Mean" and candidates
            return replace(value, problem=(OF_DIMENSIONS, CURE)) if is_unclear else value
        if axes is None:
            return replace(value, degree=None, axis=None, by=by)
        if value.axis not in axes:
            keeps = op.type != "L2Loss" and op.get_attr("keep_dims")
            fewer = 0 if keeps else sum(axis < value.axis for axis in axes)
            other = kind if candidates & axes else value.other
            return replace(value, axis=value.axis - fewer, other=other)
        if kind == "Mean":
            value = replace(value, axis=None, by=by, other="")
            return self._divided(op, value) if _is_of_chosen(op.inputs[0]) else value
        if value.other == "Mean":
            return replace(value, axis=None, by=by, problem=(OF_DIMENSIONS, CURE))
        count = 0 if None in shape else int(np.prod([shape[axis] for axis in axes]))
        constants = [each.constants for each in value.sums] or [frozenset()]
        return replace(
            value,
            degree=None if value.degree is None else value.degree + 1,
            axis=None,
            by=by,
            sums=frozenset(Sum(count, each) for each in constants),
            other="Sum" if candidates - axes else "",
        )

    def _product(self, op: tf.Operation, values: Sequence[Value]) -> Value:
        first, second = values
        sign = -1 if op.type in QUOTIENTS else 1
        problem = first.problem or second.problem
        sums = first.sums or second.sums
        degree: float | None = None
        if first.degree is not None and second.degree is not None:
            degree = first.degree + sign * second.degree  # 0 without data
        if not (first.has_data and second.has_data):
            data, index = (first, 1) if first.has_data else (second, 0)
            if not values[index].has_variables:  # else it is a weight that changes
                number = _number_of(op.inputs[index])
                if index == 1 and sign < 0 and number and not math.isnan(number):
                    number = 1 / number
                sums = frozenset(each.times(number) for each in data.sums or {Sum()})
        rank = op.outputs[0].shape.rank
        axes = [
            v.axis + (rank or 0) - (t.shape.rank or 0)
            for v, t in zip(values, op.inputs)
            if v.axis is not None
        ]
        by = first.by if first.has_data else second.by
        penalties = _each_once(each.penalties for each in values)
        axis = axes[0] if axes else None
        pairs = (first, second), (second, first)
        factors = [
            unweighted(v) if other.has_data or other.has_variables else v for v, other in pairs
        ]
        value = replace(
            Value(degree, axis, True, True, sums, by, problem, penalties),
            nonlinear=_each_once(each.nonlinear for each in values),
            is_exact=all(each.is_exact for each in factors),
        )
        if sign < 0 and second.axis is None:
            return self._divided(op, value, second.degree) if self._divides(op) else value
        is_of_batch = first.has_data and second.has_data and None in (first.axis, second.axis)
        is_of_batch = is_of_batch and all(map(self.depends_on_data, op.inputs))
        return self._not_linear(op, value) if is_of_batch else value

    def _function(self, op: tf.Operation, value: Value) -> Value:
        """Returns the value of a function that is not linear in its inputs."""
        is_of_batch = value.axis is None and value.degree is not None
        is_of_batch = is_of_batch and any(map(self.depends_on_data, op.inputs))
        is_count = is_of_batch and not _depends_on_variables(op.outputs[0])
        return self._not_linear(op, value) if is_of_batch and not is_count else unweighted(value)

    def depends_on_data(self, tensor: tf.Tensor) -> bool:
        """Returns True if the values of this rank's data, and not only their shapes, decide it."""
        return self._data.get(tensor.op, False) and _depends_on_values(tensor, self.data)

    def _divides(self, op: tf.Operation) -> bool:
        """Returns True for a quotient whose divisor depends on the values of the data."""
        return self.depends_on_data(op.inputs[1])

    def _divided(self, op: tf.Operation, value: Value, degree: float | None = None) -> Value:
        """Returns the value of a quotient whose divisor may differ between ranks."""
        is_fixed = not _depends_on_variables(op.inputs[1])
        value = self._not_linear(op, value, degree)
        return replace(value, is_exact=value.is_exact and is_fixed)

    def _not_linear(self, op: tf.Operation, value: Value, degree: float | None = None) -> Value:
        """Notes an operation that is not linear in numbers of this rank's data."""
        if self.size == 1:
            return value
        is_exact = unweighted(value).is_exact and self.weighs and can_weigh(op, degree)
        return replace(value, nonlinear=(*value.nonlinear, op), is_exact=is_exact)

    def _count(self, op: tf.Operation) -> Value:
        source = op.inputs[0]
        if op.type == "Size":
            axis, index = self.value(source).axis, None
        elif source.op.type in ("Shape", "ShapeN"):
            axis = self.value(source.op.inputs[source.value_index]).axis
            begin = tf.get_static_value(op.inputs[1]) if op.type == "StridedSlice" else None
            index = None if begin is None else int(begin[0])
        elif self.batch.is_length(op):
            axis = index = 0
        else:
            return self._of_leaf(op.outputs[0])
        degree = 0 if axis is None or index not in (None, axis) else 1
        return Value(degree, None, True, sums=frozenset({Sum()}), by=f"{op.type} {op.name!r}")

    def _of_call(self, op: tf.Operation) -> Value:
        results = []
        for _, body in original_functions(op):
            for argument, tensor in parameters(op, body):
                self._data[argument.op] = self._data.get(tensor.op, False)
                self._variables[argument.op] = self._variables.get(tensor.op, False)
                self._values[argument.op] = self.value(tensor)
            self.read(body.outputs)
            results.append([self.value(each) for each in body.outputs])
        self._results[op] = [joined(parts) for parts in zip(*results)]
        return Value(None, has_data=True, by=f"{op.type} {op.name!r}")


def scope_of(op: tf.Operation) -> str:
    """Returns the name scope of an operation, by which loss functions are known."""
    return str(op.name.rpartition("/")[0])


def _captured_by(op: tf.Operation) -> Any:
    """Returns the tensor that an argument of a function takes from around it; else None."""
    if op.type != "Placeholder":
        return None
    source = outside(op.outputs[0])
    return None if source is op.outputs[0] else source


def sources(op: tf.Operation) -> list[tf.Operation]:
    """Returns the operations that compute the inputs of one, also from outside of its function."""
    source = _captured_by(op)
    if source is None:
        return data_before(op)
    return [source.op] if hasattr(source, "graph") else []  # else it has a value, as a constant


def _depends_on_values(tensor: tf.Tensor, data: Collection[tf.Operation]) -> bool:
    """Returns True if the data of a rank decide a number by more than their shapes."""
    return any(
        op in data
        or OF_THIS_RANK.match(op.type) is not None
        or (op.type in _OF_SHAPES and _is_of_chosen(op.inputs[0]))
        for op in _values_before(tensor)
    )


def _is_of_chosen(tensor: tf.Tensor) -> bool:
    """Returns True for elements that a mask has chosen, which may be more on another rank."""

    def before(op: tf.Operation) -> Collection[tf.Operation]:
        return sources(op) if op.type in _OF_ROWS else []

    chosen = [op for op in walk([tensor.op], before) if op.type in _SELECTING]
    found = {op.type for each in chosen for op in walk([each.inputs[1].op], sources)}
    return "Where" in found or any(each.type == "DynamicPartition" for each in chosen)


def _depends_on_variables(tensor: tf.Tensor) -> bool:
    return any(op.type in VARIABLES for op in _values_before(tensor))


def _values_before(tensor: tf.Tensor) -> Iterable[tf.Operation]:
    """Returns the operations whose values, and not only their shapes, decide a tensor."""

    def before(op: tf.Operation) -> list[tf.Operation]:
        if op.type == "Fill":
            return [op.inputs[1].op]
        return [] if op.type in _OF_SHAPES else sources(op)

    return walk([tensor.op], before)


def _number_of(tensor: tf.Tensor) -> float:
    """Returns the absolute value of a constant; math.nan if it is not known, or has several."""
    value = constant_of(tensor)
    numbers = np.unique(np.abs(np.asarray(np.nan if value is None else value, np.float64)))
    is_known = numbers.size == 1 and not np.isnan(numbers[0])
    return float(numbers[0]) if is_known else math.nan


def _axes(op: tf.Operation) -> set[int] | None:
    rank = op.inputs[0].shape.rank
    if rank is None:
        return None
    if op.outputs[0].shape.rank == 0:
        return set(range(rank))
    axes = tf.get_static_value(op.inputs[1])
    return None if axes is None else {int(axis) % rank for axis in np.ravel(axes)}
