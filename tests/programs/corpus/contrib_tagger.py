"""A program of TensorFlow 1: tags sequences with a CRF over LSTMs in both directions."""

import sys

import numpy as np
import tensorflow as tf
from tensorflow.contrib import crf
from tensorflow.contrib.learn.python.learn import learn_runner

MODEL_DIR, BATCH_SIZE, OPTIMIZER = sys.argv[1], int(sys.argv[2]), sys.argv[3]
OPTIMIZERS = {
    "LazyAdam": lambda: tf.contrib.opt.LazyAdamOptimizer(0.01),
    "AdamW": lambda: tf.contrib.opt.AdamWOptimizer(0.001, learning_rate=0.01),
}


def input_fn():
    random = np.random.RandomState(0)
    words = random.randint(1, 30, [64, 6])
    lengths = random.randint(1, 7, [64])
    data = ({"words": words, "lengths": lengths}, words % 3)
    return tf.data.Dataset.from_tensor_slices(data).repeat().batch(BATCH_SIZE)


def model_fn(features, labels, mode):
    lengths = features["lengths"]
    table = tf.get_variable("words", [30, 8])
    words = tf.transpose(tf.nn.embedding_lookup(table, features["words"]), [1, 0, 2])
    forward = tf.contrib.rnn.LSTMBlockFusedCell(8)
    backward = tf.contrib.rnn.TimeReversedFusedRNN(tf.contrib.rnn.LSTMBlockFusedCell(8))
    with tf.variable_scope("forward"):
        outputs, _ = forward(words, dtype=tf.float32, sequence_length=lengths)
    with tf.variable_scope("backward"):
        reverse, _ = backward(words, dtype=tf.float32, sequence_length=lengths)
    logits = tf.layers.dense(tf.transpose(tf.concat([outputs, reverse], 2), [1, 0, 2]), 3)
    transitions = tf.get_variable("transitions", [3, 3])
    tags, _ = crf.crf_decode(logits, transitions, lengths)
    likelihood, _ = crf.crf_log_likelihood(logits, labels, lengths, transitions)
    loss = tf.reduce_mean(-likelihood)
    train_op = None
    if mode == tf.contrib.learn.ModeKeys.TRAIN:
        step = tf.contrib.framework.get_or_create_global_step()
        train_op = OPTIMIZERS[OPTIMIZER]().minimize(loss, step)
    mask = tf.sequence_mask(lengths, 6)
    metrics = {"accuracy": tf.metrics.accuracy(labels, tags, mask)}
    return tf.estimator.EstimatorSpec(mode, tags, loss, train_op, metrics)


def experiment_fn(run_config, hparams):
    estimator = tf.estimator.Estimator(model_fn, config=run_config)
    return tf.contrib.learn.Experiment(
        estimator, input_fn, input_fn, train_steps=hparams.steps, eval_steps=4
    )


learn_runner.run(
    experiment_fn,
    run_config=tf.contrib.learn.RunConfig(model_dir=MODEL_DIR),
    hparams=tf.contrib.training.HParams(steps=20),
)
