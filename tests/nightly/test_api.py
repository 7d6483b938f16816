"""hostopt.tensorflow in a single process: its arguments, refusals, objects and XLA boundaries."""

from __future__ import annotations

import numpy as np
from harness import run_python

CLUSTERS = """
import tensorflow as tf
import hostopt.tensorflow as hvd

@tf.function
def model(x, split):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.tanh(tf.matmul(x, x))
        y = hvd.overlap(y) if split else y
        z = tf.reduce_sum(tf.tanh(tf.matmul(y, y)))
    return z, tape.gradient(z, x)

options = tf.compat.v1.RunOptions(output_partition_graphs=True)
for split in (False, True):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        metadata = tf.compat.v1.RunMetadata()
        x = tf.compat.v1.placeholder(tf.float32, [2, 2])
        outputs = model.python_function(x, split)
        values = session.run(outputs, {x: [[0.1, 0.2], [0.3, 0.4]]}, options, metadata)
        kinds = ("XlaLaunch", "_XlaRun")
        nodes = [n for graph in metadata.partition_graphs for n in graph.node]
        print("CLUSTERS", sum(n.op in kinds for n in nodes), *values[1].ravel().tolist())
"""


def test_overlap_splits_a_cluster_of_xla() -> None:
    flags = "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit --tf_xla_min_cluster_size=2"
    done = run_python("-c", CLUSTERS, TF_XLA_FLAGS=flags)
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("CLUSTERS")]
    (one, *values), (several, *others) = lines
    assert int(one) >= 1 and int(several) >= int(one) + 2, lines  # forward and backward
    np.testing.assert_allclose([float(each) for each in values], [float(each) for each in others])
