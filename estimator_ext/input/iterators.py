"""States of tf.data iterators: operations that serialize them, fingerprints of their pipelines."""

from __future__ import annotations

import zlib
from typing import Any

import tensorflow as tf

from estimator_ext._tf_private import serialize_iterator
from estimator_ext.graphs.called_functions import library_of, with_called
from estimator_ext.graphs.walks import ancestors

# What tf.data does about a function that keeps a state outside of the iterator.
IGNORE_EXTERNAL_STATE, FAIL_ON_EXTERNAL_STATE = 1, 2


def serialize(iterator: tf.Tensor, policy: int, max_bytes: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Builds operations that serialize the state of an iterator.

    Args:
      max_bytes: serialization ends with the part that exceeds this size.

    Returns:
      Tensors: the parts of the state, strings of shape [parts]; their total size in bytes, int64.
    """
    state = serialize_iterator(iterator, policy)

    def add(
        index: tf.Tensor, size: tf.Tensor, parts: tf.TensorArray
    ) -> tuple[tf.Tensor, tf.Tensor, tf.TensorArray]:
        part = tf.io.serialize_tensor(state[index])
        size += tf.cast(tf.strings.length(part), tf.int64)
        return index + 1, size, parts.write(index, part)

    empty = tf.TensorArray(tf.string, tf.size(state), element_shape=[])
    count, size, parts = tf.while_loop(
        lambda index, size, _: tf.logical_and(index < tf.size(state), size <= max_bytes),
        add,
        (0, tf.constant(0, tf.int64), empty),
        parallel_iterations=1,
    )
    return parts.gather(tf.range(count)), size


def fingerprint(iterator: tf.Operation) -> int:
    """Returns a CRC-32 of the pipeline of an iterator: its kinds of datasets and constants."""
    checksum = 0
    for node in _nodes_of(iterator):
        checksum = zlib.crc32(node.op.encode(), checksum)
        if node.op == "Const":
            checksum = zlib.crc32(node.attr["value"].SerializeToString(), checksum)
    return checksum


def reads_generator(iterator: tf.Operation) -> bool:
    """Returns True if the pipeline of an iterator reads a Python generator, which has no state."""
    library = library_of(iterator.graph)
    called = with_called(_nodes_of(iterator), library)
    return any(node.op == "GeneratorDataset" for nodes in called for node in nodes)


def _nodes_of(iterator: tf.Operation) -> list[Any]:
    makers = [op for tensor in iterator.outputs for op in tensor.consumers()]
    nodes = [
        op.node_def
        for maker in makers
        if maker.type == "MakeIterator"
        for op in ancestors([maker])
    ]
    if iterator.type == "OneShotIterator":
        nodes += library_of(iterator.graph)[iterator.get_attr("dataset_factory").name]
    return nodes
