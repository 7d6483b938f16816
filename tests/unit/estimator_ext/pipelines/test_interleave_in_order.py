"""`parallel_interleave` keeps its order also in functions of datasets, where no option reaches."""

from __future__ import annotations

import pytest
import tensorflow as tf
from tensorflow.python.data.ops import readers

from estimator_ext._tf_private import interleave_in_order


def test_sloppy_is_ignored_also_in_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = readers.ParallelInterleaveDataset
    monkeypatch.setattr(kind, "__init__", kind.__init__)  # restored afterwards
    interleave_in_order()
    rows = tf.data.experimental.parallel_interleave(
        tf.data.Dataset.from_tensors, cycle_length=2, sloppy=True
    )
    with tf.Graph().as_default() as graph:
        data = tf.data.Dataset.range(4).window(2).flat_map(lambda window: window.apply(rows))
        tf.compat.v1.data.make_one_shot_iterator(data)
        functions = graph.as_graph_def().library.function
    nodes = [node for each in functions for node in each.node_def if "Interleave" in node.op]
    assert nodes and {node.attr["deterministic"].s for node in nodes} == {b"true"}
