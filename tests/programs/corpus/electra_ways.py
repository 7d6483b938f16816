"""What ELECTRA does: an AdamW of its own, rates by layer, global_step.assign; TensorFlow 1."""

import re

import numpy as np
import tensorflow as tf
from arguments import read_arguments

args = read_arguments()


class AdamWeightDecay(tf.train.Optimizer):
    def __init__(self, rates):
        super().__init__(False, "AdamWeightDecay")
        self._rates = rates

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        assignments = []
        for part, rate in self._rates.items():
            for grad, variable in grads_and_vars:
                if grad is not None and variable.name.startswith(part):
                    assignments += self._update(grad, variable, rate)
        return tf.group(*assignments, name=name)

    def _update(self, grad, variable, rate):
        name = re.match("(.*):", variable.name)[1]
        m, v = (
            tf.get_variable(
                f"{name}/adam_{slot}",
                variable.shape,
                trainable=False,
                initializer=tf.zeros_initializer(),
            )
            for slot in "mv"
        )
        next_m = 0.9 * m + 0.1 * grad
        next_v = 0.999 * v + 0.001 * tf.square(grad)
        update = next_m / (tf.sqrt(next_v) + 1e-6)
        if "bias" not in name:
            update += 0.01 * variable
        return variable.assign(variable - rate * update), m.assign(next_m), v.assign(next_v)


def input_fn(params):
    random = np.random.RandomState(3)
    x = random.normal(size=[640, 8]).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, (x.sum(1) > 0).astype(np.int32))).repeat()
    return data.apply(
        tf.data.experimental.map_and_batch(
            lambda *each: each, params["batch_size"], num_parallel_batches=4, drop_remainder=True
        )
    )


def model_fn(features, labels, mode, params):
    net = features
    for name in ("layer_0", "layer_1"):
        net = tf.layers.dense(net, 16, tf.tanh, name=name)
    logits = tf.layers.dense(net, 2, name="task")
    loss = tf.reduce_mean(tf.losses.sparse_softmax_cross_entropy(labels, logits, reduction="none"))
    step = tf.train.get_or_create_global_step()
    rate = tf.train.polynomial_decay(0.02, step, args.steps, 0.0)
    rate *= tf.minimum(1.0, tf.cast(step, tf.float32) / 5)
    rates = {"task": rate, "layer_1": rate * 0.8, "layer_0": rate * 0.64}
    variables = tf.trainable_variables()
    gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), 0.1)
    train_op = AdamWeightDecay(rates).apply_gradients([*zip(gradients, variables)], step)
    train_op = tf.group(train_op, step.assign(step + 1))
    return tf.estimator.tpu.TPUEstimatorSpec(mode, loss=loss, train_op=train_op)


config = tf.estimator.tpu.RunConfig(
    tpu_config=tf.estimator.tpu.TPUConfig(
        per_host_input_for_training=tf.estimator.tpu.InputPipelineConfig.PER_HOST_V2
    ),
    model_dir=args.model_dir,
)
estimator = tf.estimator.tpu.TPUEstimator(
    model_fn, config=config, use_tpu=False, train_batch_size=args.batch_size
)
estimator.train(input_fn, max_steps=args.steps)
