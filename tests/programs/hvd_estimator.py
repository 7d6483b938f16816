"""A program for Horovod with an Estimator: a CNN for MNIST, logging, checkpoints on rank 0.

Rank 0 evaluates between trainings, and its graph of the evaluation has an optimizer, too.
"""

import argparse
import os

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd  # isort: skip

parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()
v1 = tf.compat.v1


def cnn_model_fn(features, labels, mode):
    images = tf.reshape(features["x"], [-1, 28, 28, 1])
    layers = v1.layers
    x = layers.conv2d(images, 8, 5, padding="same", activation=tf.nn.relu)
    x = layers.max_pooling2d(x, 4, 4)
    x = layers.flatten(x)
    x = layers.batch_normalization(x, training=False)
    logits = layers.dense(x, 10)
    predictions = {"classes": tf.argmax(logits, 1)}
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=predictions)
    loss = v1.losses.sparse_softmax_cross_entropy(labels, logits)
    optimizer = v1.train.MomentumOptimizer(learning_rate=0.01 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer)
    train_op = optimizer.minimize(loss, global_step=v1.train.get_global_step())
    metrics = {"accuracy": v1.metrics.accuracy(labels, predictions["classes"])}
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)


def batches(batch_size):
    """The batches of this rank: together the ranks read the data once, in order."""
    data = np.load(os.path.join(args.directory, "data.npz"))
    dataset = tf.data.Dataset.from_tensor_slices(({"x": data["x"]}, data["y"]))
    return dataset.shard(hvd.size(), hvd.rank()).repeat().batch(batch_size // hvd.size())


def main():
    hvd.init()
    config = v1.ConfigProto()
    config.gpu_options.allow_growth = True
    config.gpu_options.visible_device_list = str(hvd.local_rank())
    model_dir = os.path.join(args.directory, "model") if hvd.rank() == 0 else None
    classifier = tf.estimator.Estimator(
        cnn_model_fn,
        model_dir=model_dir,
        config=tf.estimator.RunConfig(session_config=config, tf_random_seed=hvd.rank() + 1),
    )
    hooks = [hvd.BroadcastGlobalVariablesHook(0)]
    for _ in range(2):
        classifier.train(lambda: batches(64), steps=args.steps // 2, hooks=hooks)
        if hvd.rank() == 0:
            print(classifier.evaluate(lambda: batches(64), steps=2))
    weights = {
        name: classifier.get_variable_value(name) for name in classifier.get_variable_names()
    }
    np.savez(os.path.join(args.directory, f"weights-{hvd.rank()}.npz"), **weights)


main()
