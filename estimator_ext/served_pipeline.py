"""Checks that data workers prepare a dataset as one process would."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import tensorflow as tf

from estimator_ext._tf_private import variant_tensor
from estimator_ext.divided_pipeline import INSTEAD, check_transformations
from estimator_ext.errors import UnsupportedError
from estimator_ext.graph import walk

__all__: list[str] = []

_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_VARIABLES = ("VarHandleOp", "Variable", "VariableV2")


def check_dataset(data: Any, workers: int) -> None:
    """Checks that data workers can prepare a dataset, and that each element stays what it is.

    Args:
      data: the value that input_fn returned.
      workers: number of data workers.

    Raises:
      UnsupportedError: it is no dataset, it calls Python or reads a variable, or its elements
        would depend on how the data workers divide its source.
    """
    if not isinstance(data, tf.data.Dataset):
        raise UnsupportedError(
            f"input_fn returned a {type(data).__name__}, wanted a tf.data.Dataset: data workers "
            "prepare only a dataset. Return one, or set RunConfig.data_service='off'"
        )
    operations = walk([variant_tensor(data).op])
    check_transformations(operations, workers)
    for kind, name in _nodes_of(operations):
        if kind in _PYTHON:
            raise UnsupportedError(
                f"the dataset of input_fn calls a Python function (operation {name!r} of type "
                f"{kind}), as from_generator, py_function and numpy_function do. Data workers are "
                f"other processes and cannot call it. {INSTEAD}"
            )
        if kind in _VARIABLES:
            raise UnsupportedError(
                f"the dataset of input_fn reads the variable {name!r}, which data workers do not "
                f"have. {INSTEAD}"
            )


def _nodes_of(operations: list[tf.Operation]) -> Iterator[tuple[str, str]]:
    """Yields types and names of operations, and of those in the functions that they call."""
    library = operations[0].graph.as_graph_def().library.function
    functions = {function.signature.name: function.node_def for function in library}
    todo: list[Collection[Any]] = [[op.node_def for op in operations]]
    while todo:
        for node in todo.pop():
            yield node.op, node.name
            for called in (node.op, *_functions_of(node)):  # TensorFlow 1 calls by the type
                todo += [functions.pop(called)] if called in functions else []


def _functions_of(node: Any) -> Iterator[str]:
    for attribute in node.attr.values():
        yield from (each.name for each in [attribute.func, *attribute.list.func] if each.name)
