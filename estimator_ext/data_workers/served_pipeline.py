"""Checks that data workers prepare a dataset as one process would."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from estimator_ext._tf_private import variant_tensor
from estimator_ext.errors import UnsupportedError
from estimator_ext.graphs.called_functions import Nodes, library_of, with_called
from estimator_ext.graphs.walks import walk
from estimator_ext.pipelines.divided_pipeline import (
    INSTEAD,
    check_transformations,
    describe_values,
    is_source,
)

_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_VARIABLES = re.compile(r"VarHandleOp|Variable(V2)?|Mutable\w*HashTable\w*")
_SEEDED = re.compile("Random|Shuffle")  # operations whose constants are seeds and sizes of buffers


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
    called = with_called([op.node_def for op in operations], library_of(operations[0].graph))
    for kind, name in ((node.op, node.name) for nodes in called for node in nodes):
        if kind in _PYTHON:
            raise UnsupportedError(
                f"the dataset of input_fn calls a Python function (operation {name!r} of type "
                f"{kind}), as from_generator, py_function and numpy_function do. Data workers are "
                f"other processes and cannot call it. {INSTEAD}"
            )
        if _VARIABLES.fullmatch(kind):
            raise UnsupportedError(
                f"the dataset of input_fn reads {name!r} of type {kind}, whose value on the ranks "
                f"data workers do not have. {INSTEAD}"
            )


def transformations_of(data: tf.data.Dataset) -> dict[str, str]:
    """Describes the transformations of a dataset, which must be the same on all ranks.

    Returns:
      For each transformation: its type, its constants, and a checksum of the types of its
      operations. The operations of its functions are included. Seeds and the order of values are
      left out.
    """
    operations = walk([variant_tensor(data).op])
    library = library_of(operations[0].graph)
    transformations = [op for op in operations if _makes_dataset(op) and not is_source(op)]
    return {
        f"transformation {index}": _describe(op, library)
        for index, op in enumerate(transformations)
    }


def _makes_dataset(op: tf.Operation) -> bool:
    return any(tensor.dtype == tf.variant for tensor in op.outputs)


def _describe(op: tf.Operation, library: Mapping[str, Nodes]) -> str:
    def before(each: tf.Operation) -> list[tf.Operation]:
        is_another = each is not op and _makes_dataset(each)
        return [] if is_another else [tensor.op for tensor in each.inputs]

    own = [each for each in walk([op], before) if each is op or not _makes_dataset(each)]
    called = with_called([each.node_def for each in own], library)
    values, kinds = [], []
    for nodes in called:
        kinds += [node.op for node in nodes if node.op not in library]
        seeded = _before_seeded(nodes)
        values += [
            describe_values(tf.make_ndarray(node.attr["value"].tensor))
            for node in nodes
            if node.op == "Const" and node.name not in seeded
        ]
    checksum = zlib.crc32(" ".join(kinds).encode())
    constants = ", ".join(values) or "none"
    return f"{op.type} of {len(kinds)} operations ({checksum:08x}) with constants: {constants}"


def _before_seeded(nodes: Nodes) -> set[str]:
    """Returns the names of nodes whose values become seeds, or sizes of buffers."""
    by_name = {node.name: node for node in nodes}
    found: set[str] = set()
    todo = [node for node in nodes if _SEEDED.search(node.op)]
    while todo:
        for name in (each.lstrip("^").partition(":")[0] for each in todo.pop().input):
            node = by_name.get(name)
            if node is not None and name not in found and "Dataset" not in node.op:
                found.add(name)
                todo.append(node)
    return found
