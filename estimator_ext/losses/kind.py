"""Finds out if a loss is a mean or a sum over the examples of its batch.

A loss of degree 0 is a mean, one of degree 1 a sum, and any other is neither (`losses.reader`);
"Mean or sum" in docs/programs.md lists the cases. A constant factor of a sum may be 1 / n, which
the graph does not tell from a weight: it is one if it is the batch size of the data.

A penalty on weights does not depend on the data. Beside a sum it would count once on each rank, so
it is noted, to be divided by the number of ranks.

An optimizer of TensorFlow takes mean or sum by another rule (`last_reduction`): the last reduction
that loss functions of `tf.compat.v1.losses` and Keras have stored in the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from estimator_ext._tf_private import replace_input
from estimator_ext.graphs.operation_kinds import OF_THIS_RANK, PRODUCTS, QUOTIENTS
from estimator_ext.graphs.walks import data_before, walk
from estimator_ext.losses.comparisons import comparison
from estimator_ext.losses.nonlinear import factor_of_one, is_inside
from estimator_ext.losses.reader import (
    CURE,
    CURE_OF_BOTH,
    OF_BOTH,
    LossReader,
    Sum,
    Value,
    joined,
    scope_of,
)

_CURE_OF_SMALLER = (
    "Divide by the number of examples in the batch, or leave smaller batches out: "
    "batch(n, drop_remainder=True) and repeat()"
)

_NO_REDUCTION, SUM = "none", "sum"  # as Keras says it, too
MEAN = tf.compat.v1.losses.Reduction.MEAN
_SMALLEST_WEIGHT = 0.5  # a smaller factor of a sum may be 1 / batch size


@dataclass(frozen=True)
class LossKind:
    """A loss: a mean or a sum over the batch, or neither."""

    is_sum: bool
    reason: str
    problem: tuple[str, str] | tuple[()] = ()  # if it is neither: a text, and the remedy
    penalties: tuple[tuple[tf.Operation, int], ...] = ()  # inputs that count once in all ranks
    nonlinear: tuple[tf.Operation, ...] = ()  # whose gradients are to be weighted
    warns: bool = False  # the model may not be that of one process


def kind_of(targets: Iterable[Any], reader: LossReader, can_divide: bool = True) -> LossKind:
    """Returns the kind of a loss: the sum of all elements of the targets."""
    if reader.said:
        return LossKind(reader.said == "sum", f"--loss {reader.said}")
    tensors = [each for each in targets if isinstance(each, tf.Tensor)]
    reader.read(tensors)
    value = joined(reader.summed(reader.value(each), each) for each in tensors)
    if value.problem:
        return LossKind(False, "", value.problem)
    for op, index in value.penalties:
        if is_inside(op) or not can_divide:
            text = f"adds a penalty on weights ({op.inputs[index].name}) to a sum over the batch"
            return LossKind(False, "", (text, CURE_OF_BOTH))
    if not value.has_data:
        return LossKind(False, "it does not depend on the data")
    if value.degree is None:
        reason = f"this is assumed, as {value.by} hides how it is reduced over the batch"
        return LossKind(False, reason, warns=True)
    if value.degree == 0:
        kind = LossKind(False, f"{value.by} reduces it", penalties=value.penalties)
        return _with_warning(kind, value, comparison(tensors, reader), can_divide)
    if value.degree != 1:
        text = f"grows with the batch size to the power of {value.degree} ({value.by})"
        return LossKind(False, "", (text, CURE))
    kind = _kind_of_sums(value, reader.batch.lengths, reader.size)
    if reader.weighted and not (kind.is_sum or kind.problem):
        text = f"is a sum over the batch ({value.by}) times 1 / batch size, "
        text += "but batches may be smaller"
        return LossKind(False, "", (text, _CURE_OF_SMALLER))
    return _with_warning(kind, value, comparison(tensors, reader), can_weigh=False)


def _with_warning(
    kind: LossKind, value: Value, pairing: tf.Operation | None, can_weigh: bool
) -> LossKind:
    """Returns the kind with operations to be weighted, or with why the model may differ."""
    if kind.problem:
        return kind
    option = f"`--loss {'sum' if kind.is_sum else 'mean'}` if this is what you want"
    if pairing is not None:
        fault = f"{pairing.name!r} compares the examples of this rank only"
        cure = f"Say {option}"
    elif not value.nonlinear:
        return kind
    elif can_weigh and value.is_exact:
        return replace(kind, nonlinear=value.nonlinear)
    else:
        quotients = [each for each in value.nonlinear if each.type in ("Mean", *QUOTIENTS)]
        others = [each for each in value.nonlinear if each not in quotients]
        fault = " and ".join(
            f"{' or '.join(repr(each.name) for each in operations)} {verb} a number of this "
            "rank's data"
            for verb, operations in (("divides by", quotients), ("is not linear in", others))
            if operations
        )
        cure = (
            "Compute it outside of branches and functions, and add it to the loss unchanged; use "
            f"a number that is the same on all ranks; or say {option}"
        )
    reason = f"{kind.reason}, but {fault}, so the model is not that of one process. {cure}"
    return replace(kind, reason=reason, warns=True)


class Penalties:
    """Factors of the penalties in the losses of a graph, which are 1 until they are divided."""

    def __init__(self) -> None:
        self.factors: dict[tuple[tf.Operation, int], tf.Operation] = {}

    def prepare(self, kind: LossKind) -> None:
        """Multiplies the penalties of a loss by factors, before its backward pass is built."""
        for op, index in kind.penalties:
            if (op, index) in self.factors:
                continue
            penalty = op.inputs[index]
            with op.graph.as_default(), tf.control_dependencies(None), tf.device(penalty.device):
                factor = factor_of_one(penalty.dtype)
                replace_input(op, index, penalty * factor)
            self.factors[op, index] = factor.op

    def divide(self, kind: LossKind, share: Any) -> None:
        """Gives each rank its share of the penalties of a loss: a number or a scalar tensor."""
        for key in kind.penalties:
            factor = self.factors[key]
            graph, device = factor.graph, tf.device(factor.device)
            with graph.as_default(), tf.control_dependencies(None), device:
                replace_input(factor, 0, tf.cast(share, factor.outputs[0].dtype))


def _kind_of_sums(value: Value, lengths: Collection[int], size: int) -> LossKind:
    sums = value.sums or {Sum()}
    kinds = {_is_sum(each, lengths, size) for each in sums}
    if None in kinds:
        factors = [c for each in sums for c in each.constants if not c >= _SMALLEST_WEIGHT]
        text = f"is a sum over the batch ({value.by}) times a constant ({factors[0]:g}), "
        text += "which may be a weight or 1 / batch size"
        return LossKind(False, "", (text, CURE))
    if len(kinds) > 1:
        return LossKind(False, "", (f"{OF_BOTH} ({value.by})", CURE_OF_BOTH))
    (is_sum,) = kinds
    reason = f"{value.by} sums it up" + ("" if is_sum else ", times 1 / batch size")
    return LossKind(bool(is_sum), reason, penalties=value.penalties)


def _is_sum(total: Sum, lengths: Collection[int], size: int) -> bool | None:
    """Returns True for a sum, False for a mean, None if a factor may be a weight or 1 / n."""
    counts = [n for n in (total.terms, *lengths) if n > 1]
    if any(_is_one(c * n) for c in total.constants for n in counts):
        return False
    if any(_is_one(c * n * size) for c in total.constants for n in lengths):
        return True  # divided by the batch size of all ranks
    return True if all(c >= _SMALLEST_WEIGHT for c in total.constants) else None


def _is_one(number: float) -> bool:
    return abs(number - 1) < 1e-5


# -- the rule of TensorFlow ------------------------------------------------------------------


def last_reduction(targets: Iterable[Any], reductions: Mapping[str, str]) -> str | None:
    """Returns the last reduction before the targets; "none" only if there is no other.

    Reductions of loss functions are given by the scope of their operations. A sum that is divided,
    or multiplied by a value that depends on data, counts as a mean.
    """

    def before_losses(op: tf.Operation) -> Collection[tf.Operation]:
        return [] if scope_of(op) in reductions else data_before(op)

    if not reductions:
        return None
    operations = [each.op for each in targets if isinstance(each, tf.Tensor)]
    divided: list[tf.Operation] = []
    if SUM in reductions.values():  # else the walk for each product is not needed
        divided = [
            op
            for op in walk(operations, before_losses)
            if op.type in QUOTIENTS or (op.type in PRODUCTS and not _has_factor_of_all(op))
        ]
    averaged = {scope_of(op) for op in walk(divided, data_before)}
    scopes = {scope_of(op) for op in walk(operations, data_before)}
    found = [
        MEAN if reduction == SUM and scope in averaged else reduction
        for scope, reduction in reductions.items()
        if scope in scopes
    ]
    found = [each for each in found if each != _NO_REDUCTION] or found
    return found[-1] if found else None


def _has_factor_of_all(op: tf.Operation) -> bool:
    return any(
        not any(OF_THIS_RANK.match(each.type) for each in walk([factor.op], data_before))
        for factor in op.inputs
    )
