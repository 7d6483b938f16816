"""Walks over a graph: before and after operations, and into the functions that they call."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from estimator_ext._tf_private import (
    control_flow_context,
    control_outputs,
    get_func_graph,
    original_func_graph,
)

LOOPS_BACK = ("NextIteration", "RefNextIteration")
BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
LOOPS = ("While", "StatelessWhile")
# Pass on a variable, also in the control flow of TensorFlow 1.
PASSES_VARIABLE = re.compile(r"(Ref)?(Identity|IdentityN|Switch|Enter|Merge|NextIteration|Exit)$")
CALLS = (*BRANCHES, *LOOPS, "PartitionedCall", "StatefulPartitionedCall")

Neighbours = Callable[[tf.Operation], Iterable[tf.Operation]]
Nodes = Collection[Any]  # of the definition of a graph or a function


def data_before(op: tf.Operation) -> list[tf.Operation]:
    """Returns the operations that compute the inputs of one."""
    return list(dict.fromkeys(tensor.op for tensor in op.inputs))


def data_after(op: tf.Operation) -> list[tf.Operation]:
    """Returns the operations that compute something from the outputs of one."""
    return [reader for output in op.outputs for reader in output.consumers()]


def runs_before(op: tf.Operation) -> list[tf.Operation]:
    """Returns the operations that run before one because of its inputs or control inputs."""
    return list(dict.fromkeys([*data_before(op), *op.control_inputs]))


def runs_after(op: tf.Operation) -> list[tf.Operation]:
    """Returns the operations that one runs before because of its outputs or control outputs."""
    return list(dict.fromkeys([*data_after(op), *control_outputs(op)]))


def walk(targets: Iterable[tf.Operation], before: Neighbours = runs_before) -> list[tf.Operation]:
    """Returns operations and all those before them, in topological order.

    Returns:
      Each operation once, after those that it depends on. There is one exception: the end of a
      loop (`LOOPS_BACK`) comes after the beginning of the loop, which depends on it.
    """
    order: dict[tf.Operation, None] = {}
    entered: set[tf.Operation] = set()
    loop_ends: list[tf.Operation] = []
    todo = list(targets)
    # Depth first, with a stack in place of recursion: graphs are deeper than Python's stack. An
    # operation stays on the stack below those before it, and is appended when it is on top again.
    while todo or loop_ends:
        if not todo:
            todo.append(loop_ends.pop())
        op = todo[-1]
        if op in entered:
            order[todo.pop()] = None
            continue
        entered.add(op)
        new = [each for each in before(op) if each not in entered]
        loop_ends += [each for each in new if each.type in LOOPS_BACK]
        todo += [each for each in new if each.type not in LOOPS_BACK]
    return list(order)


def operations_before(operations: Iterable[tf.Operation]) -> set[tf.Operation]:
    """Returns all operations that run if some operations are run."""
    return set(walk(operations))


def ancestors(targets: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Returns all operations that run if some operations are run, in the order of the graph."""
    before = operations_before(targets)
    return [op for op in targets[0].graph.get_operations() if op in before]


def depends_on(
    targets: Iterable[tf.Operation],
    sources: Collection[tf.Operation],
    before: Neighbours = runs_before,
) -> bool:
    """Returns True if a target is one of the sources or depends on one."""
    return not set(sources).isdisjoint(walk(targets, before))


def users(tensor: tf.Tensor) -> Iterator[tuple[tf.Operation, tf.Tensor]]:
    """Yields operations that read or change a variable, or call a function that may do so.

    Each comes with the tensor that it takes.
    """
    todo, found = [tensor], {tensor.ref()}
    for each in todo:  # which grows; a loop may come back to a tensor
        for op in each.consumers():
            if not PASSES_VARIABLE.match(op.type):
                yield op, each
                continue
            todo += [output for output in op.outputs if output.ref() not in found]
            found.update(output.ref() for output in op.outputs)


def uses(op: tf.Operation, tensor: tf.Tensor) -> Iterator[tuple[tf.Operation, tf.Tensor]]:
    """Yields what an operation that takes a variable does with it, also in functions it calls.

    Each operation that reads or changes the variable comes with the tensor that it takes.
    """
    within = op.outputs
    if not PASSES_VARIABLE.match(op.type):
        pairs = (pair for _, body in functions_called(op) for pair in parameters(op, body))
        within = [argument for argument, passed in pairs if passed.name == tensor.name]
    if not within:
        yield op, tensor
    for each in within:
        for user, taken in users(each):
            yield from uses(user, taken)


def predicates_around(op: tf.Operation) -> list[tf.Tensor]:
    """Returns the predicates of TensorFlow 1 around an operation, the innermost first."""
    predicates, context = [], control_flow_context(op)
    while context is not None:
        if context.IsCondContext():
            predicates.append(context.pred)
        elif context.IsWhileContext():
            predicates.append(context.pivot)
        context = context.outer_context
    return predicates


def decided_before(op: tf.Operation) -> list[tf.Operation]:
    """Returns the operations that run before one, and those that decide whether it runs."""
    decides = [tensor.op for tensor in predicates_around(op)]
    # the condition of a loop depends on the operations in the loop
    return [*runs_before(op), *(each for each in decides if each.type != "LoopCond")]


def functions_called(op: tf.Operation) -> Iterator[tuple[str, Any]]:
    """Yields attribute, such as `then_branch`, and a copy of the graph of each called function."""
    for attribute, name in _names_of_functions(op):
        yield attribute, get_func_graph(op, None, name)


def parameters(op: tf.Operation, body: Any) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Returns the arguments of a function that an operation calls, with the inputs for them."""
    # the first inputs of the operation may be no arguments, such as the index of a branch
    return list(zip(body.inputs, op.inputs[len(op.inputs) - len(body.inputs) :]))


def original_functions(op: tf.Operation) -> list[tuple[str, Any]]:
    """Returns the graphs of the functions that an operation calls, as the program built them."""
    return [(each, original_func_graph(op, name)) for each, name in _names_of_functions(op)]


def _names_of_functions(op: tf.Operation) -> Iterator[tuple[str, str]]:
    for attribute in op.op_def.attr:
        if attribute.type not in ("func", "list(func)"):
            continue
        value = op.get_attr(attribute.name)
        for function in value if attribute.type == "list(func)" else [value]:
            yield attribute.name, function.name


def done(op: tf.Operation) -> tf.Operation:
    """Returns an operation that runs after one and all operations of the functions it calls.

    A consumer by control may run before the branches of a conditional operation are done.
    """
    if op.outputs and any(True for _ in functions_called(op)):
        with tf.control_dependencies(None), tf.device(op.device):
            return tf.raw_ops.IdentityN(input=op.outputs)[0].op
    return op


def library_of(graph: tf.Graph) -> dict[str, Nodes]:
    """Returns the nodes of each function of a graph, by its name."""
    functions = graph.as_graph_def().library.function
    return {function.signature.name: function.node_def for function in functions}


def with_called(nodes: Nodes, library: Mapping[str, Nodes]) -> Iterator[Nodes]:
    """Yields the nodes, then the nodes of each called function; all ranks have the same order."""
    found: set[str] = set()
    todo = [nodes]
    while todo:
        nodes = todo.pop()
        yield nodes
        for node in nodes:
            attributes = [value for _, value in sorted(node.attr.items())]
            called = [each.name for a in attributes for each in (a.func, *a.list.func)]
            for name in (node.op, *called):  # TensorFlow 1 calls by the type
                if name in library and name not in found:
                    found.add(name)
                    todo.append(library[name])
