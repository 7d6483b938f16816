"""A program that configures TensorFlow's devices and threads before it creates an estimator."""

import sys

import tensorflow as tf

tf.config.threading.set_intra_op_parallelism_threads(1)
for gpu in tf.config.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, True)
cpu = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu[0], [tf.config.LogicalDeviceConfiguration()] * 2)
assert len(tf.config.list_logical_devices("CPU")) == 2


def input_fn():
    return tf.data.Dataset.from_tensor_slices(({"x": [1.0, 2.0]}, [1.0, 2.0])).repeat().batch(2)


column = tf.feature_column.numeric_column("x")
tf.estimator.LinearRegressor([column], sys.argv[1]).train(input_fn, max_steps=3)
