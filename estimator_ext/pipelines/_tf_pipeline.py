"""Private names of TensorFlow: what a pipeline of tf.data keeps of the calls that built it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from estimator_ext._tf_private import DatasetV1Adapter, variant_tensor


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the datasets that a dataset transforms, without wrappers of TensorFlow 1."""
    return [without_wrapper(each) for each in dataset._inputs()]


def without_wrapper(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset of TensorFlow 2 within one of TensorFlow 1."""
    while isinstance(dataset, DatasetV1Adapter):
        dataset = dataset._dataset
    return dataset


def scalars_of(dataset: tf.data.Dataset) -> dict[str, tf.Tensor]:
    """Returns the integers that a transformation was called with, such as seeds, by name."""
    return {
        name.lstrip("_"): value
        for name, value in sorted(vars(dataset).items())
        if tf.is_tensor(value) and value.dtype in (tf.int32, tf.int64) and value.shape.rank == 0
    }


def function_graphs(dataset: tf.data.Dataset) -> list[tf.Graph]:
    """Returns the graphs of the functions that a transformation calls."""
    functions = [each.function for each in dataset._functions()]
    return [each.graph for each in functions if hasattr(each, "graph")]  # not of legacy functions


def loses_order(dataset: tf.data.Dataset) -> bool:
    """Returns True if a transformation was called eagerly with deterministic=False."""
    known = getattr(dataset, "_deterministic", None)
    if known is not None:
        return bool(known == "false")
    try:
        text = tf.raw_ops.DatasetToGraphV2(
            input_dataset=variant_tensor(dataset),
            external_state_policy=1,  # ignores states
        )
    except tf.errors.OpError:  # it holds too much, or what cannot be written
        return False
    nodes = tf.compat.v1.GraphDef.FromString(text.numpy()).node
    return any(node.attr["deterministic"].s == b"false" for node in nodes)


def generator_state(dataset: tf.data.Dataset) -> Any:
    """Returns what calls the generator of a `from_generator`; None for other transformations.

    Its attribute `_generator` is the generator, and may be replaced.
    """
    for each in dataset._functions():
        begins = _captured(each._func, "get_iterator_id_fn")
        if begins is not None:
            return _captured(begins, "generator_state")
    return None


def _captured(function: Any, name: str) -> Any:
    """Returns a variable of the function around a function; None if it uses no such variable."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return function.__closure__[names.index(name)].cell_contents if name in names else None
