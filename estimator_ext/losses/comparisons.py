"""Finds operations on pairs of examples, such as the matrix of all similarities in a batch.

A rank pairs the examples of its own batch only, so the mean over the ranks is not the loss of one
process. An operation pairs examples if both operands have a dimension of examples, and the result
has them as two dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from estimator_ext.graphs.operation_kinds import ADDING, PRODUCTS, QUOTIENTS
from estimator_ext.graphs.walks import CALLS, original_functions, walk
from estimator_ext.losses.batch_axis import BatchAxis
from estimator_ext.losses.reader import LossReader, sources

_ELEMENTWISE: tuple[str, ...] = (*ADDING, *PRODUCTS, *QUOTIENTS, "SquaredDifference")
_ELEMENTWISE += ("Maximum", "Minimum", "Equal", "NotEqual", "Greater", "GreaterEqual", "Less")
_ELEMENTWISE += ("LessEqual", "LogicalAnd", "LogicalOr")
# with the attributes that say which operands are transposed
_MATRIX_PRODUCTS = {"MatMul": ("transpose_a", "transpose_b")}
_MATRIX_PRODUCTS |= dict.fromkeys(("BatchMatMulV2", "BatchMatMulV3"), ("adj_x", "adj_y"))


def comparison(targets: Sequence[tf.Tensor], reader: LossReader) -> tf.Operation | None:
    """Returns an operation that compares the examples of a batch with each other, if any.

    Args:
      reader: has read the targets.
    """

    if reader.size == 1 or reader.batch.lengths == {1}:  # one example has no pairs
        return None

    def before(op: tf.Operation) -> list[tf.Operation]:
        if op in reader.data or op in reader.gradients:
            return []
        bodies = [body for _, body in original_functions(op)] if op.type in CALLS else []
        return [*sources(op), *(each.op for body in bodies for each in body.outputs)]

    for op in walk([each.op for each in targets], before):
        is_of_pairs = len(op.inputs) == 2 and _pairs_examples(op, reader.batch)
        if is_of_pairs and all(map(reader.depends_on_data, op.inputs)):
            return op
    return None


def _pairs_examples(op: tf.Operation, batch: BatchAxis) -> bool:
    if op.type not in (*_ELEMENTWISE, *_MATRIX_PRODUCTS, "Einsum"):
        return False
    # counted from the last dimension
    first, second = ([a - each.shape.rank for a in batch.candidates(each)] for each in op.inputs)
    if op.type in _ELEMENTWISE:  # two candidates may be two features of the same size
        return len(first) == len(second) == 1 and first != second
    if op.type in _MATRIX_PRODUCTS:
        transposed = [op.get_attr(name) for name in _MATRIX_PRODUCTS[op.type]]
        if op.type != "MatMul":  # the first one may be an example, and the other one a position
            first, second = first[:1], second[:1]
        return (-1 if transposed[0] else -2) in first and (-2 if transposed[1] else -1) in second
    if not (first and second):
        return False
    operands, _, result = op.get_attr("equation").decode().partition("->")
    names = [each[axes[0] :][:1] for each, axes in zip(operands.split(","), (first, second))]
    return names[0] != names[1] and set(names) <= set(result)
