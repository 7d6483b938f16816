"""What NVIDIA's BERT does: Horovod's all-reduce within tf.cond, LAMB, several micro-batches."""

import os
import re

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from arguments import read_arguments
from horovod.tensorflow.compression import Compression

args = read_arguments()
ACCUMULATED = 2


class LAMBOptimizer(tf.train.Optimizer):
    def __init__(self, rate):
        super().__init__(False, "LAMBOptimizer")
        self._rate = rate

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        assignments = []
        for grad, variable in grads_and_vars:
            name = re.match("(.*):", variable.name)[1]
            m, v = (self._slot(f"{name}/lamb_{slot}", variable) for slot in "mv")
            next_m = 0.9 * m + 0.1 * grad
            next_v = 0.999 * v + 0.001 * tf.square(grad)
            update = next_m / (tf.sqrt(next_v) + 1e-6) + 0.01 * variable
            ratio = tf.norm(variable) / tf.maximum(tf.norm(update), 1e-6)
            next_value = variable - self._rate * ratio * update
            assignments += [variable.assign(next_value), m.assign(next_m), v.assign(next_v)]
        assignments.append(global_step.assign_add(1))
        return tf.group(*assignments)

    def _slot(self, name, variable):
        start = tf.zeros_initializer()
        return tf.get_variable(name, variable.shape, trainable=False, initializer=start)


def input_fn():
    random = np.random.RandomState(3)
    x = random.normal(size=[640, 8]).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, (x.sum(1) > 0).astype(np.int32))).repeat()
    return data.shard(hvd.size(), hvd.rank()).batch(args.batch_size)


def model_fn(features, labels, mode):
    start = tf.glorot_uniform_initializer(seed=5)
    net = tf.layers.dense(features, 16, tf.tanh, kernel_initializer=start)
    bias = tf.ones_initializer()  # its norm decides the rate
    logits = tf.layers.dense(net, 2, kernel_initializer=start, bias_initializer=bias)
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    step, variables = tf.train.get_or_create_global_step(), tf.trainable_variables()
    optimizer = LAMBOptimizer(0.05)  # one that depends on the step would be read while it changes
    count = tf.get_variable(
        "local_step", [], tf.int32, tf.zeros_initializer(), trainable=False, use_resource=True
    )
    sums = [
        tf.get_variable(f"sum_{i}", v.shape, initializer=tf.zeros_initializer(), trainable=False)
        for i, v in enumerate(variables)
    ]
    gradients = tf.gradients(loss, variables)
    starts = tf.equal(count % ACCUMULATED, 0)
    added = [
        total.assign(tf.cond(starts, lambda g=g: g, lambda g=g, t=total: t + g))
        for total, g in zip(sums, gradients)
    ]

    def update():
        reduced = [hvd.allreduce(t / ACCUMULATED, compression=Compression.none) for t in added]
        reduced, _ = tf.clip_by_global_norm(reduced, 1.0)
        return optimizer.apply_gradients([*zip(reduced, variables)], step)

    is_last = tf.equal(count % ACCUMULATED, ACCUMULATED - 1)
    train_op = tf.cond(is_last, update, tf.no_op)
    with tf.control_dependencies([train_op, *added]):
        train_op = count.assign_add(1)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


hvd.init()
parent, name = os.path.split(args.model_dir)
own_dir = os.path.join(parent, f"rank-{hvd.rank()}", name)
estimator = tf.estimator.Estimator(model_fn, args.model_dir if hvd.rank() == 0 else own_dir)
hooks = [hvd.BroadcastGlobalVariablesHook(0)]
estimator.train(input_fn, hooks=hooks, max_steps=args.steps)
