"""Transformations of a dataset whose source data workers divide among each other.

Each data worker applies all transformations to its own part of the source. A transformation is
accepted only if the ranks together get the elements that one process would get.
`test_divided_pipelines.py` compares them, with TensorFlow's servers.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from estimator_ext._tf_private import replace_tensor, variant_tensor
from estimator_ext.errors import UnsupportedError
from estimator_ext.graphs.walks import Nodes, library_of, walk, with_called

INSTEAD = (
    "Build the pipeline of other TensorFlow operations, or set RunConfig.data_service='off', with "
    "which each rank prepares its data itself"
)
# Datasets whose elements data workers divide. With "Dataset", and perhaps a version, these are the
# names of operations.
_DIVIDED = {
    *("Range", "SparseTensorSlice", "Tensor", "TensorSlice"),
    *("FixedLengthRecord", "TFRecord", "TextLine"),
    *("Batch", "DenseToSparseBatch", "MapAndBatch", "PaddedBatch", "ParallelBatch", "Rebatch"),
    *("Filter", "IgnoreErrors", "Map", "ParallelMap", "ParseExample", "Unbatch"),
    *("FlatMap", "Interleave", "ParallelInterleave", "LegacyParallelInterleave"),
    *("Concatenate", "DirectedInterleave", "GroupByWindow"),
    *("Shard", "Zip"),  # of one part, and of one dataset
    *("Repeat", "Shuffle", "ShuffleAndRepeat"),
    *("MaxIntraOpParallelism", "Model", "Options", "Prefetch", "PrivateThreadPool"),
    "Rewrite",  # of the numbers of enumerate(), which has a zip()
}
# Their result depends on earlier elements, of which each data worker has others.
_COUNTING = {
    "AssertCardinality": "assert_cardinality",
    "Random": "random",
    "Scan": "scan",
    "Skip": "skip",
    "Take": "take",
    "TakeWhile": "take_while",
    "Unique": "unique",
    "Window": "window",
}
_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_VARIABLES = re.compile(r"VarHandleOp|Variable(V2)?|Mutable\w*HashTable\w*")
_SEEDED = re.compile("Random|Shuffle")  # operations whose constants are seeds and sizes of buffers
_NAME = re.compile(r"(?:Experimental)?(\w+)Dataset(?:V\d+)?")


def check_dataset(data: Any, workers: int) -> None:
    """Checks that data workers prepare a dataset as one process would."""
    if not isinstance(data, tf.data.Dataset):
        raise UnsupportedError(
            f"input_fn returned a {type(data).__name__}, wanted a tf.data.Dataset: data workers "
            "prepare only a dataset. Return one, or set RunConfig.data_service='off'"
        )
    operations = walk([variant_tensor(data).op])
    _check_transformations(operations, workers)
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


def _check_transformations(operations: Sequence[tf.Operation], workers: int) -> None:
    """Checks that no transformation loses, doubles or changes elements."""
    chosen = [_choices_of(op) for op in operations if kind_of(op) == "DirectedInterleave"]
    choices = set().union(*chosen)
    for op in operations:
        if op not in choices or kind_of(op) in _COUNTING.keys() - {"Random"}:
            _check_transformation(op, workers)


def _choices_of(op: tf.Operation) -> list[tf.Operation]:
    """Returns the operations with which sample_from_datasets() chooses, which are not divided."""
    choices = walk([op.inputs[0].op])
    if not any(kind_of(each) == "Random" for each in choices):
        raise UnsupportedError(
            f"the dataset of input_fn calls choose_from_datasets() ({op.name!r}). Data workers "
            "divide the choices and the datasets separately, so that elements would be lost. Use "
            "sample_from_datasets() or interleave(), or set RunConfig.data_service='off'"
        )
    return choices


def kind_of(op: tf.Operation) -> str:
    """Returns the name of a transformation; an empty string for other operations."""
    match = _NAME.fullmatch(op.type)
    return match[1] if match else ""


def _check_transformation(op: tf.Operation, workers: int) -> None:
    name = kind_of(op)
    if name == "Zip" and len(op.inputs) > 1:
        raise UnsupportedError(
            f"the dataset of input_fn joins {len(op.inputs)} datasets with zip() or enumerate() "
            f"({op.name!r}). Data workers divide each of them separately, so that elements would "
            "not match. Make one dataset of tuples, such as from_tensor_slices((features, "
            "labels)), join within interleave() or flat_map(), or set "
            "RunConfig.data_service='off'"
        )
    if name == "Cache":
        raise UnsupportedError(
            f"the dataset of input_fn calls cache() ({op.name!r}). Each data worker would cache "
            "its own part, which is lost when it restarts. Leave cache() out, or set "
            "RunConfig.data_service='off'"
        )
    if name == "GroupByWindow" and workers > 1 and _has_later_iterators(op):
        raise UnsupportedError(
            "the dataset of input_fn calls group_by_window() or bucket_by_sequence_length() "
            f"({op.name!r}) after shuffle() or repeat(). TensorFlow then has each of {workers} "
            "data workers read all data. Call it before, use one data worker, or set "
            "RunConfig.data_service='off'"
        )
    if name == "Shard" and tf.get_static_value(op.inputs[1]) != 1:
        raise UnsupportedError(
            f"the dataset of input_fn calls shard() ({op.name!r}). Data workers prepare the "
            "dataset of rank 0 for all ranks, so the other shards would never be read. Return "
            "all data, or set RunConfig.data_service='off'"
        )
    if name in _COUNTING and workers > 1:
        raise UnsupportedError(
            f"the dataset of input_fn calls {_COUNTING[name]}() ({op.name!r}), which each of "
            f"{workers} data workers would apply to its own part of the data. Choose the elements "
            "before the dataset is made, use one data worker, or set RunConfig.data_service='off'"
        )
    if name and name not in _DIVIDED and name not in _COUNTING:
        raise UnsupportedError(
            f"the dataset of input_fn uses {op.type} ({op.name!r}), which data workers cannot "
            f"divide, or are not known to divide right. {INSTEAD}"
        )


def _has_later_iterators(op: tf.Operation) -> bool:
    """Returns True if a transformation before this one opens its input only when it is read.

    A sequential interleave() or a group_by_window() reads its input as a nested dataset. What is
    opened only then is not divided.
    """
    return any(kind_of(each).startswith(("Shuffle", "Repeat")) for each in walk([op.inputs[0].op]))


def transformations_of(data: tf.data.Dataset) -> dict[str, str]:
    """Describes the sources and transformations of a dataset, which ranks must have in common.

    Each is described by its type, its constants, and a checksum of the types of its operations,
    with those of its functions. Seeds are left out, and so is the order of values, as each rank
    may have shuffled them.
    """
    operations = walk([variant_tensor(data).op])
    library = library_of(operations[0].graph)
    transformations = filter(_makes_dataset, operations)
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
            _describe_values(tf.make_ndarray(node.attr["value"].tensor))
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


def _describe_values(values: np.ndarray[Any, Any]) -> str:
    """Returns a number, or the type, shape and checksum of values, whose order does not count."""
    if values.dtype.hasobject:
        kind, checksum = "string", zlib.crc32(b"\0".join(sorted(values.reshape(-1).tolist())))
    elif not values.ndim:
        return str(values)
    else:
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        kind, checksum = values.dtype.name, zlib.crc32(np.sort(data))
    return f"{kind}{list(values.shape)} with checksum {checksum:08x}"


def divisible(data: tf.data.Dataset) -> tf.data.Dataset:
    """Replaces each sequential interleave() after shuffle() or repeat() by a parallel one.

    TensorFlow would not divide its input. The elements and their order stay the same. The
    operations of `data`, in a graph, are changed.
    """
    data = data.prefetch(0)  # so that another operation reads each interleave
    for op in walk([variant_tensor(data).op]):
        if op.type == "InterleaveDataset" and _has_later_iterators(op):
            replace_tensor(op.outputs[0], _parallel(op))
    return data


def _parallel(op: tf.Operation) -> tf.Tensor:
    auto = tf.data.AUTOTUNE
    source, *others, cycle_length, block_length = op.inputs
    with op.graph.as_default(), tf.control_dependencies(None):
        parallel: tf.Tensor = tf.raw_ops.ParallelInterleaveDatasetV4(
            input_dataset=source,
            other_arguments=others,
            cycle_length=cycle_length,
            block_length=block_length,
            buffer_output_elements=auto,
            prefetch_input_elements=auto,
            num_parallel_calls=1,
            f=op.get_attr("f"),
            deterministic="true",
            output_types=op.get_attr("output_types"),
            output_shapes=op.get_attr("output_shapes"),
        )
    return parallel
