"""Reductions in branches and loops: built there at once, and made only if the branch is taken.

Ranks that take different branches would pair values of different steps, or wait for each other
until a timeout. So every predicate above a reduction has to be the same on all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext.graph import BRANCHES, LOOPS, functions_called, predicates_around
from hostopt.tensorflow.ops import is_same_on_all_ranks

__all__: list[str] = []

# Stateful operations whose results are the same on all ranks if their inputs are.
_READS = re.compile(
    r"ReadVariableOp|ResourceGather(Nd)?|VariableShape|VarIsInitializedOp|VarHandleOp|.*Assign.*"
    r"|(Stateless)?(If|Case|While)|(Stateful)?PartitionedCall|Assert|Print(V2)?"
)

IsSame = Callable[[tf.Tensor], bool]


def refuse_reductions_of_some_ranks(operations: Iterable[tf.Operation], is_same: IsSame) -> None:
    """Makes sure that all ranks make the reductions in branches and loops in the same steps.

    Args:
      operations: what runs in a step.
      is_same: whether all ranks have the same value of a tensor.

    Raises:
      hostopt.ConfigError: a predicate above a reduction may differ by rank.
    """
    _check(operations, is_same, None)


def _check(operations: Iterable[tf.Operation], is_same: IsSame, above: tf.Tensor | None) -> None:
    """Checks operations below a predicate that differs by rank, or below none."""
    for op in operations:
        predicates = [_decider(predicate) for predicate in predicates_around(op)]
        if op.type in BRANCHES:  # the first input chooses
            predicates.append(op.inputs[0])
        found = above
        for predicate in predicates:
            if found is None and not _is_same_in_contexts(predicate, is_same):
                found = predicate
        if found is not None and _is_reduction(op):
            raise hostopt.ConfigError(
                f"reduction {op.name!r} is made only if predicate {found.name!r} of a branch or "
                "loop says so, which may differ by rank. Reduce before the branch, as with "
                "estimator_ext.reduce_gradients, or choose the branch by a value that is reduced, "
                "as with tf.distribute.get_replica_context().all_reduce"
            )
        bodies = _bodies_with_reductions(op)
        if bodies:
            arguments = [is_same(tensor) for tensor in op.inputs]
            if op.type in LOOPS:
                arguments = _arguments_of_loop(op, arguments)
                found = found or _differing_condition(op, arguments)
            for body in bodies:
                _check(body.get_operations(), _is_same_in(body, arguments), found)


def _bodies_with_reductions(op: tf.Operation) -> list[Any]:
    if op.type.endswith("Dataset"):  # what a reduction itself calls
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
    """What a predicate of TensorFlow 1 passes on, if it is that of a loop."""
    return predicate.op.inputs[0] if predicate.op.type == "LoopCond" else predicate


def _is_same_in_contexts(tensor: tf.Tensor, is_same: IsSame) -> bool:
    """`is_same` of what a loop of TensorFlow 1 computes, and computes again."""
    seen, todo = set(), [tensor]
    while todo:
        each = todo.pop()
        if each.op in seen:
            continue
        seen.add(each.op)
        if not is_same(each):
            return False
        # what is not in a loop is known; in one, an operation may depend on later ones
        if each.op._get_control_flow_context() is not None and not is_same_on_all_ranks(each.op):
            todo += each.op.inputs
    return True


def _arguments_of_loop(op: tf.Operation, arguments: Sequence[bool]) -> list[bool]:
    """Which arguments of a loop's body are the same on all ranks in every iteration."""
    found = list(arguments)
    (body,) = [body for name, body in functions_called(op) if name == "body"]
    while True:
        is_same = _is_same_in(body, found)
        after = [old and is_same(output) for old, output in zip(found, body.outputs)]
        if after == found:
            return found
        found = after


def _differing_condition(op: tf.Operation, arguments: Sequence[bool]) -> tf.Tensor | None:
    (condition,) = [body for name, body in functions_called(op) if name == "cond"]
    is_same = _is_same_in(condition, arguments)
    return None if is_same(condition.outputs[0]) else condition.outputs[0]


def _is_same_in(body: Any, arguments: Sequence[bool]) -> IsSame:
    """`is_same` for the tensors of a function, of whose caller's inputs it is known."""
    passed = arguments[len(arguments) - len(body.inputs) :]  # the first may choose the branch
    same = {argument.op: value for argument, value in zip(body.inputs, passed)}
    for op in body.get_operations():
        if op in same:
            continue
        is_known = not op.op_def.is_stateful or _READS.fullmatch(op.type) is not None
        all_same = all(same.get(tensor.op, False) for tensor in op.inputs)
        same[op] = is_same_on_all_ranks(op) or (is_known and all_same)
    return lambda tensor: same.get(tensor.op, False)
