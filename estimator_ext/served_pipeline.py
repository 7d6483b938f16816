"""Checks that data workers prepare a dataset as one process would."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import tensorflow as tf

from estimator_ext._tf_private import variant_tensor
from estimator_ext.errors import UnsupportedError
from estimator_ext.graph import walk

__all__: list[str] = []

INSTEAD = (
    "Build the pipeline of other TensorFlow operations, or set RunConfig.data_service='off', with "
    "which each rank prepares its data itself"
)
_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_VARIABLES = ("VarHandleOp", "Variable", "VariableV2")
# Transformations whose result depends on earlier elements, of which each data worker has others.
_COUNTING = {
    "TakeDataset": "take",
    "SkipDataset": "skip",
    "ShardDataset": "shard",
    "WindowDataset": "window",
    "ScanDataset": "scan",
    "TakeWhileDataset": "take_while",
    "UniqueDataset": "unique",
}


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
    for op in operations:
        _check_transformation(op, workers)
    for kind, name in _nodes_of(operations):
        if kind in _PYTHON:
            raise UnsupportedError(
                f"the dataset of input_fn calls a Python function (operation {name!r}, {kind}), "
                "as from_generator, py_function and numpy_function do. Data workers are other "
                f"processes and cannot call it. {INSTEAD}"
            )
        if kind in _VARIABLES:
            raise UnsupportedError(
                f"the dataset of input_fn reads the variable {name!r}, which data workers do not "
                f"have. {INSTEAD}"
            )


def _check_transformation(op: tf.Operation, workers: int) -> None:
    if op.type == "ZipDataset" and len(op.inputs) > 1:
        raise UnsupportedError(
            f"the dataset of input_fn joins {len(op.inputs)} datasets with zip() or enumerate() "
            f"({op.name!r}). Data workers divide each of them separately, so that elements would "
            "not match. Make one dataset of tuples, such as from_tensor_slices((features, "
            "labels)), join within interleave() or flat_map(), or set "
            "RunConfig.data_service='off'"
        )
    if op.type.startswith("CacheDataset"):
        raise UnsupportedError(
            f"the dataset of input_fn calls cache() ({op.name!r}). Each data worker would cache "
            "its own part, which is lost when it restarts. Leave cache() out, or set "
            "RunConfig.data_service='off'"
        )
    if op.type.endswith("DirectedInterleaveDataset") and not _is_sampled(op):
        raise UnsupportedError(
            f"the dataset of input_fn calls choose_from_datasets() ({op.name!r}). Data workers "
            "divide the choices and the datasets separately, so that elements would be lost. Use "
            "sample_from_datasets() or interleave(), or set RunConfig.data_service='off'"
        )
    counts = op.type in _COUNTING and workers > 1
    if counts and not (op.type == "ShardDataset" and tf.get_static_value(op.inputs[1]) == 1):
        raise UnsupportedError(
            f"the dataset of input_fn calls {_COUNTING[op.type]}() ({op.name!r}), which each of "
            f"{workers} data workers would apply to its own part of the data. Choose the elements "
            "before the dataset is made, use one data worker, or set RunConfig.data_service='off'"
        )


def _is_sampled(op: tf.Operation) -> bool:
    """True for sample_from_datasets, whose choices are random."""
    return any("RandomDataset" in each.type for each in walk([op.inputs[0].op]))


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
