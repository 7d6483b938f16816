"""Trains canned estimators from one checkpoint: stock classes, or their model_fns on ranks."""

import os
import sys

import numpy as np
import tensorflow as tf

import estimator_ext

estimator_ext.install()
BATCH, STEPS, START = 12, 10, 3
RANDOM = np.random.RandomState(0)
X = RANDOM.standard_normal((6, BATCH, 4)).astype(np.float32)
Y = (X.sum(-1) > 0).astype(np.int64)
COLUMNS = [tf.feature_column.numeric_column("x", shape=[4])]
NAMES = ["dnn", "linear", "both"]


def make(name, model_dir, strategy=None):
    config = tf.estimator.RunConfig(
        model_dir, save_checkpoints_steps=100, train_distribute=strategy
    )
    sgd, adagrad = tf.keras.optimizers.legacy.SGD, tf.keras.optimizers.legacy.Adagrad
    estimator = tf.estimator
    if name == "dnn":
        return estimator.DNNClassifier([8], COLUMNS, optimizer=lambda: adagrad(0.1), config=config)
    if name == "linear":
        return estimator.LinearClassifier(COLUMNS, optimizer=lambda: sgd(0.1), config=config)
    return estimator.DNNLinearCombinedClassifier(
        linear_feature_columns=COLUMNS,
        linear_optimizer=lambda: sgd(0.1),
        dnn_feature_columns=COLUMNS,
        dnn_optimizer=lambda: adagrad(0.05),
        dnn_hidden_units=[8],
        config=config,
    )


def input_fn(input_context=None):
    count = input_context.num_input_pipelines if input_context else 1
    rows = BATCH // count
    begin = rows * (input_context.input_pipeline_id if input_context else 0)
    part = slice(begin, begin + rows)
    return tf.data.Dataset.from_tensor_slices(({"x": X[:, part]}, Y[:, part])).repeat()


def whole():
    return input_fn()


def receiver():
    x = tf.compat.v1.placeholder(tf.float32, [None, 4])
    return tf.estimator.export.ServingInputReceiver({"x": x}, {"x": x})


def main(kind, directory):
    strategy, data = None, input_fn
    if kind == "ranks":
        strategy = estimator_ext.HostOffloadStrategy()
    elif kind == "local":  # all ranks have the same data, and so the same model all the time
        strategy, data = estimator_ext.HostOffloadStrategy(auto_shard="off", sync_every=4), whole
    del os.environ["TF_CONFIG"]  # the stock classes must not see a cluster
    for name in NAMES:
        model_dir = os.path.join(directory, name)
        estimator = make(name, model_dir, strategy if name == "both" else None)
        if kind == "ranks" and name == "both":
            estimator = estimator_ext.adopt(estimator)
        elif strategy is not None:
            config = estimator_ext.RunConfig(
                model_dir, save_checkpoints_steps=100, train_distribute=strategy
            )
            estimator = estimator_ext.Estimator(estimator.model_fn, config=config)
        estimator.train(data, max_steps={"start": START, "later": STEPS + 3}.get(kind, STEPS))
        if kind in ("stock", "ranks") and (strategy is None or strategy.cluster.is_chief):
            metrics = estimator.evaluate(lambda: input_fn().take(6))
            np.savez(os.path.join(directory, f"{name}-metrics.npz"), **metrics)
            estimator.export_saved_model(os.path.join(directory, f"{name}-export"), receiver)


if __name__ == "__main__":
    main(*sys.argv[1:])
