"""Walks over the operations of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_util_v2 import get_func_graph

__all__: list[str] = []


def operations_before(operations: Iterable[tf.Operation]) -> set[tf.Operation]:
    """All operations that run if some are run.

    Args:
      operations: those, of one graph.

    Returns:
      They, and all on which they depend by data or control.
    """
    seen = set(operations)
    todo = list(seen)
    while todo:
        op = todo.pop()
        new = {*(tensor.op for tensor in op.inputs), *op.control_inputs} - seen
        seen |= new
        todo += new
    return seen


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
