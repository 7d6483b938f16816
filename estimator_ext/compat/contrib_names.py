"""Functions of several modules of tf.contrib that TensorFlow has in another form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow.compat.v2 as tf

from estimator_ext import _tf_private

_Transformation = Callable[[Any], Any]


def list_devices() -> list[str]:
    """Returns the names of the logical devices."""
    return [device.name for device in tf.config.list_logical_devices()]


def batch_and_drop_remainder(batch_size: Any) -> _Transformation:
    """Returns a transformation of a dataset to full batches."""
    return lambda dataset: dataset.batch(batch_size, drop_remainder=True)


def padded_batch_and_drop_remainder(
    batch_size: Any, padded_shapes: Any, padding_values: Any = None
) -> _Transformation:
    """Returns a transformation of a dataset to full padded batches."""
    return lambda dataset: dataset.padded_batch(batch_size, padded_shapes, padding_values, True)


def assert_element_shape(expected_shapes: Any) -> _Transformation:
    """Returns a transformation that gives the elements of a dataset these static shapes."""

    def ensure(*element: Any) -> Any:
        return tf.nest.map_structure(
            tf.ensure_shape, element if len(element) > 1 else element[0], expected_shapes
        )

    return lambda dataset: dataset.map(ensure)


def index_table_from_tensor(mapping: Any, *arguments: Any, **options: Any) -> Any:
    """Returns a table from strings to their indices in `mapping`."""
    return _tf_private.index_table_from_tensor(mapping, *arguments, **options)


def index_to_string_table_from_tensor(mapping: Any, *arguments: Any, **options: Any) -> Any:
    """Returns a table from indices to the strings in `mapping`."""
    return _tf_private.index_to_string_table_from_tensor(mapping, *arguments, **options)
