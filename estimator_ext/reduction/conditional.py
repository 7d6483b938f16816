"""Checks reductions in branches and loops, which are made only if the branch is taken.

Such a reduction is built at once, in the graph of its branch. Ranks that take different branches
would pair values of different steps, or wait for each other until a timeout. So every predicate
above a reduction must be the same on all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_private import control_flow_context
from estimator_ext.graphs.walks import (
    BRANCHES,
    LOOPS,
    functions_called,
    predicates_around,
    walk,
)
from hostopt.tensorflow.ops import is_same_on_all_ranks

# Stateful operations whose results are the same on all ranks if their inputs are.
_READS = re.compile(
    r"ReadVariableOp|ResourceGather(Nd)?|VariableShape|VarIsInitializedOp|VarHandleOp|.*Assign.*"
    r"|(Stateless)?(If|Case|While)|(Stateful)?PartitionedCall|Assert|Print(V2)?"
)

IsSame = Callable[[tf.Tensor], bool]


def refuse_reductions_of_some_ranks(operations: Iterable[tf.Operation], is_same: IsSame) -> None:
    """Checks that all ranks make the reductions in branches and loops in the same steps.

    Args:
      operations: operations that run in a step.
      is_same: returns True if all ranks have the same value of a tensor.

    Raises:
      hostopt.ConfigError: a predicate above a reduction may differ by rank.
    """
    _check(operations, is_same, None)


def _check(operations: Iterable[tf.Operation], is_same: IsSame, above: tf.Tensor | None) -> None:
    """Checks operations below `above`, a predicate that differs by rank; None if there is none."""
    for op in operations:
        predicates = [_decider(predicate) for predicate in predicates_around(op)]
        if op.type in BRANCHES:  # the first input chooses the branch
            predicates.append(op.inputs[0])
        differing = above
        for predicate in predicates:
            if differing is None and not _is_same_in_contexts(predicate, is_same):
                differing = predicate
        if differing is not None and _is_reduction(op):
            raise hostopt.ConfigError(
                f"reduction {op.name!r} is made only if predicate {differing.name!r} of a branch "
                "or loop says so, which may differ by rank. Reduce before the branch, as with "
                "estimator_ext.reduce_gradients, or choose the branch by a value that is reduced, "
                "as with tf.distribute.get_replica_context().all_reduce"
            )
        bodies = _bodies_with_reductions(op)
        if bodies:
            arguments = [is_same(tensor) for tensor in op.inputs]
            if op.type in LOOPS:
                arguments = _arguments_of_loop(op, arguments)
                if differing is None:
                    differing = _differing_condition(op, arguments)
            for body in bodies:
                _check(body.get_operations(), _is_same_in(body, arguments), differing)


def _bodies_with_reductions(op: tf.Operation) -> list[Any]:
    if op.type.endswith("Dataset"):  # a reduction itself calls a function through a dataset
        return []
    return [body for _, body in functions_called(op) if any(_reductions_in(body))]


def _reductions_in(body: Any) -> Iterator[tf.Operation]:
    for op in body.get_operations():
        if _is_reduction(op):
            yield op
        for inner in _bodies_with_reductions(op):
            yield from _reductions_in(inner)


def _is_reduction(op: tf.Operation) -> bool:
    return op.type == "DatasetToSingleElement" and is_same_on_all_ranks(op)


def _decider(predicate: tf.Tensor) -> tf.Tensor:
    """Returns the condition behind the predicate of a TensorFlow 1 loop, or the predicate."""
    return predicate.op.inputs[0] if predicate.op.type == "LoopCond" else predicate


def _is_same_in_contexts(tensor: tf.Tensor, is_same: IsSame) -> bool:
    """Extends `is_same` to tensors in loops of TensorFlow 1.

    `is_same` is right outside loops. In a loop, an operation may depend on one that comes later,
    in the previous iteration, so all operations before it are checked.
    """

    def inputs_in_context(op: tf.Operation) -> Sequence[tf.Tensor]:
        is_inside = control_flow_context(op) is not None and not is_same_on_all_ranks(op)
        return op.inputs if is_inside else ()

    before = walk([tensor.op], lambda op: [each.op for each in inputs_in_context(op)])
    return is_same(tensor) and all(
        is_same(each) for op in before for each in inputs_in_context(op)
    )


def _arguments_of_loop(op: tf.Operation, arguments: Sequence[bool]) -> list[bool]:
    """Returns which arguments of a loop's body are the same on all ranks in every iteration.

    An argument that differs after one iteration may make others differ in the next one. So the
    body is evaluated until nothing changes.
    """
    current = list(arguments)
    (body,) = [body for name, body in functions_called(op) if name == "body"]
    while True:
        is_same = _is_same_in(body, current)
        after = [before and is_same(output) for before, output in zip(current, body.outputs)]
        if after == current:
            return current
        current = after


def _differing_condition(op: tf.Operation, arguments: Sequence[bool]) -> tf.Tensor | None:
    """Returns the condition of a loop if it may differ by rank."""
    (condition,) = [body for name, body in functions_called(op) if name == "cond"]
    is_same = _is_same_in(condition, arguments)
    return None if is_same(condition.outputs[0]) else condition.outputs[0]


def _is_same_in(body: Any, arguments: Sequence[bool]) -> IsSame:
    """Returns `is_same` for the tensors of a function.

    Args:
      arguments: for each input of the calling operation, True if it is the same on all ranks.
    """
    passed = arguments[len(arguments) - len(body.inputs) :]  # the first input may choose a branch
    same = {argument.op: value for argument, value in zip(body.inputs, passed)}
    for op in body.get_operations():
        if op in same:
            continue
        is_known = not op.op_def.is_stateful or _READS.fullmatch(op.type) is not None
        all_same = all(same.get(tensor.op, False) for tensor in op.inputs)
        same[op] = is_same_on_all_ranks(op) or (is_known and all_same)
    return lambda tensor: same.get(tensor.op, False)
