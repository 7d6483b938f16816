"""Walks over a graph, from some operations back to what they depend on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_util_v2 import get_func_graph

__all__: list[str] = []

LOOPS_BACK = ("NextIteration", "RefNextIteration")
BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
LOOPS = ("While", "StatelessWhile")
CALLS = (*BRANCHES, *LOOPS, "PartitionedCall", "StatefulPartitionedCall")

Neighbours = Callable[[tf.Operation], Iterable[tf.Operation]]


def data_before(op: tf.Operation) -> list[tf.Operation]:
    """The operations whose values one takes.

    Args:
      op: an operation.

    Returns:
      They, each once, in the order of the inputs.
    """
    return list(dict.fromkeys(tensor.op for tensor in op.inputs))


def runs_before(op: tf.Operation) -> list[tf.Operation]:
    """The operations that run before one, because of its inputs or its control inputs.

    Args:
      op: an operation.

    Returns:
      They, each once.
    """
    return list(dict.fromkeys([*data_before(op), *op.control_inputs]))


def walk(targets: Iterable[tf.Operation], before: Neighbours = runs_before) -> list[tf.Operation]:
    """Operations that some depend on, sorted.

    Args:
      targets: where to begin.
      before: what an operation depends on directly.

    Returns:
      They and all before them, each one after those that it depends on. The end of a loop is the
      one exception: it comes after the loop's beginning, which depends on it.
    """
    order: list[tf.Operation] = []
    entered: set[tf.Operation] = set()
    done: set[tf.Operation] = set()
    loop_ends: list[tf.Operation] = []
    todo = list(targets)
    while todo or loop_ends:
        if not todo:
            todo.append(loop_ends.pop())
        op = todo[-1]
        if op not in entered:
            entered.add(op)
            new = [each for each in before(op) if each not in entered]
            loop_ends += [each for each in new if each.type in LOOPS_BACK]
            todo += [each for each in new if each.type not in LOOPS_BACK]
            continue
        todo.pop()
        if op not in done:
            done.add(op)
            order.append(op)
    return order


def operations_before(operations: Iterable[tf.Operation]) -> set[tf.Operation]:
    """All operations that run if some are run.

    Args:
      operations: those, of one graph.

    Returns:
      They, and all on which they depend by data or control.
    """
    return set(walk(operations))


def ancestors(targets: Sequence[tf.Operation]) -> list[tf.Operation]:
    """All operations that run if some are run.

    Args:
      targets: those, of one graph; one at least.

    Returns:
      They and the others, in the order in which they were built.
    """
    found = operations_before(targets)
    return [op for op in targets[0].graph.get_operations() if op in found]


def depends_on(
    targets: Iterable[tf.Operation],
    sources: Collection[tf.Operation],
    before: Neighbours = runs_before,
) -> bool:
    """Whether operations depend on one of some others, or are among them.

    Args:
      targets: where to begin.
      sources: what to look for.
      before: what an operation depends on directly.

    Returns:
      True if one of the sources is found.
    """
    return not set(sources).isdisjoint(walk(targets, before))


def predicates_around(op: tf.Operation) -> list[tf.Tensor]:
    """What decides whether an operation runs, in branches and loops of TensorFlow 1.

    Args:
      op: an operation.

    Returns:
      The predicates of the branches and loops in which it was built, the innermost first.
    """
    found, context = [], op._get_control_flow_context()
    while context is not None:
        if context.IsCondContext():
            found.append(context.pred)
        elif context.IsWhileContext():
            found.append(context.pivot)
        context = context.outer_context
    return found


def decided_before(op: tf.Operation) -> list[tf.Operation]:
    """The operations that run before one, and those that decide whether it runs.

    Args:
      op: an operation.

    Returns:
      They, each once; not the end of a loop, which depends on what is in the loop.
    """
    decides = [tensor.op for tensor in predicates_around(op)]
    return [*runs_before(op), *(each for each in decides if each.type != "LoopCond")]


def functions_called(op: tf.Operation) -> Iterator[tuple[str, Any]]:
    """The graphs of the functions that an operation calls.

    Args:
      op: any operation.

    Yields:
      Name of the attribute that holds the function, such as `then_branch`, and the graph.
    """
    for attribute in op.op_def.attr:
        if attribute.type not in ("func", "list(func)"):
            continue
        value = op.get_attr(attribute.name)
        for function in value if attribute.type == "list(func)" else [value]:
            yield attribute.name, get_func_graph(op, None, function.name)
