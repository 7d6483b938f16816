"""What the official ResNet does: a strategy inside the program, epochs of train and evaluate."""

import numpy as np
import tensorflow.compat.v1 as tf
from arguments import read_arguments

args = read_arguments(num_gpus={"type": int, "default": 0})


def get_distribution_strategy(num_gpus):
    if num_gpus < 2:
        return tf.distribute.OneDeviceStrategy("device:GPU:0" if num_gpus else "device:CPU:0")
    return tf.distribute.MirroredStrategy([f"device:GPU:{i}" for i in range(num_gpus)])


def input_fn():
    random = np.random.RandomState(2)
    images = random.normal(size=[96, 8, 8, 3]).astype(np.float32)
    labels = (images[:, :4].sum((1, 2, 3)) > 0).astype(np.int32)
    data = tf.data.Dataset.from_tensor_slices((images, labels))
    return data.repeat().batch(args.batch_size).prefetch(1)


def model_fn(features, labels, mode, params):
    def conv(x, strides):
        start = tf.variance_scaling_initializer(seed=6)
        return tf.layers.conv2d(x, 4, 3, strides, "same", use_bias=False, kernel_initializer=start)

    net = conv(features, 1)
    net += conv(tf.nn.relu(conv(tf.nn.relu(net), 1)), 1)
    logits = tf.layers.dense(tf.reduce_mean(net, [1, 2]), 2, name="final_dense")
    cross_entropy = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    l2_loss = [tf.nn.l2_loss(tf.cast(v, tf.float32)) for v in tf.trainable_variables()]
    loss = cross_entropy + params["weight_decay"] * tf.add_n(l2_loss)
    step = tf.train.get_or_create_global_step()
    rate = tf.train.piecewise_constant(step, [6, 12], [0.1, 0.05, 0.01])
    optimizer = tf.train.MomentumOptimizer(rate, 0.9)
    minimize_op = optimizer.apply_gradients(optimizer.compute_gradients(loss), step)
    train_op = tf.group(minimize_op, tf.get_collection(tf.GraphKeys.UPDATE_OPS))
    metrics = {"accuracy": tf.metrics.accuracy(labels, tf.argmax(logits, 1))}
    return tf.estimator.EstimatorSpec(mode, None, loss, train_op, metrics)


config = tf.estimator.RunConfig(
    train_distribute=get_distribution_strategy(args.num_gpus),
    session_config=tf.ConfigProto(allow_soft_placement=True),
    save_checkpoints_secs=60 * 60 * 24,
)
classifier = tf.estimator.Estimator(model_fn, args.model_dir, config, {"weight_decay": 2e-4})
for _ in range(2):
    classifier.train(input_fn, steps=args.steps // 2)
    print(classifier.evaluate(input_fn, steps=2))
