"""Programs with names of tf.contrib."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf
from runner import run

HOST_CALL = """
import sys
import tensorflow as tf

def host_call_fn(step, loss):
    with tf.contrib.summary.create_file_writer(sys.argv[1]).as_default():
        with tf.contrib.summary.always_record_summaries():
            tf.contrib.summary.scalar("loss", loss[0], step=step[0])
            return tf.contrib.summary.all_summary_ops()

def model_fn(features, labels, mode, params):
    loss = tf.reduce_mean((features * tf.get_variable("w", [1]) - labels) ** 2)
    step = tf.train.get_or_create_global_step()
    optimizer = tf.contrib.tpu.CrossShardOptimizer(tf.train.GradientDescentOptimizer(0.1))
    call = (host_call_fn, [tf.reshape(step, [1]), tf.reshape(loss, [1])])
    train_op = optimizer.minimize(loss, step)
    return tf.contrib.tpu.TPUEstimatorSpec(mode, loss=loss, train_op=train_op, host_call=call)

def input_fn(params):
    ones = tf.ones([64, 1])
    data = tf.data.Dataset.from_tensor_slices((ones, 2 * ones))
    return data.repeat().batch(params["batch_size"])

config = tf.contrib.tpu.RunConfig(model_dir=sys.argv[2])
estimator = tf.contrib.tpu.TPUEstimator(
    model_fn, config=config, use_tpu=False, train_batch_size=16
)
estimator.train(input_fn, max_steps=5)
"""


def test_a_host_call_writes_summaries(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(HOST_CALL)
    run(2, "--v1", str(program), str(tmp_path / "written"), str(tmp_path / "model"))
    files = list((tmp_path / "written").iterdir())
    assert len(files) == 2  # one of each rank
    for path in files:
        events = list(tf.compat.v1.train.summary_iterator(str(path)))
        assert [event.step for event in events if event.summary.value] == [0, 1, 2, 3, 4]
