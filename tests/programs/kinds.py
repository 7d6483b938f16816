"""Trains estimators of every kind briefly, in TensorFlow 1 style, and prints their losses."""

import json
import sys

import numpy as np
import tensorflow.compat.v1 as tf

import estimator_ext

estimator_ext.install()
tf.disable_v2_behavior()

RANDOM = np.random.RandomState(0)
X = RANDOM.rand(64, 2).astype(np.float32)
Y = (X.sum(axis=1) > 1).astype(np.int32)
COLUMNS = [tf.feature_column.numeric_column("x", shape=[2])]


def input_fn(epochs=None):
    return tf.estimator.inputs.numpy_input_fn(
        {"x": X}, Y, batch_size=64, num_epochs=epochs, shuffle=False
    )


def model_fn(features, labels, mode):
    logits = tf.layers.dense(tf.layers.dense(features["x"], 8, tf.nn.relu), 1)
    head = tf.estimator.BinaryClassHead()
    optimizer = tf.train.AdamOptimizer(0.05)
    return head.create_estimator_spec(
        features,
        mode,
        logits,
        labels=labels,
        train_op_fn=lambda loss: optimizer.minimize(loss, tf.train.get_global_step()),
    )


def data_input_fn(epochs=None):
    return lambda: tf.data.Dataset.from_tensors(({"x": X}, Y)).repeat(epochs)


def keras_model():
    layers = [tf.keras.layers.Dense(1, activation="sigmoid", input_shape=(2,), name="x")]
    model = tf.keras.Sequential(layers)
    model.compile(tf.keras.optimizers.Adam(0.05), "binary_crossentropy")
    return model


def keras_input_fn(epochs=None):
    return lambda: tf.data.Dataset.from_tensors((X, Y[:, None])).repeat(epochs)


def kinds(model_dir):
    estimator = tf.estimator

    def config(name, **options):
        return estimator.RunConfig(f"{model_dir}/{name}", tf_random_seed=1, **options)

    linear = estimator.LinearClassifier(COLUMNS, config=config("linear"))
    yield "linear", linear, input_fn
    yield "deep", estimator.DNNClassifier([8], COLUMNS, config=config("deep")), input_fn
    both = estimator.DNNLinearCombinedClassifier(
        linear_feature_columns=COLUMNS,
        dnn_feature_columns=COLUMNS,
        dnn_hidden_units=[8],
        config=config("both"),
    )
    yield "both", both, input_fn
    yield "baseline", estimator.BaselineClassifier(config=config("baseline")), input_fn
    yield "regressor", estimator.DNNRegressor([8], COLUMNS, config=config("regressor")), input_fn
    yield "layers", estimator.Estimator(model_fn, config=config("layers")), input_fn
    with_metrics = estimator.add_metrics(
        estimator.Estimator(model_fn, config=config("metrics")),
        lambda predictions, labels: {"mean": tf.metrics.mean(predictions["class_ids"])},
    )
    yield "metrics", with_metrics, input_fn
    mirrored = tf.distribute.MirroredStrategy(["/cpu:0"])
    yield (
        "local",
        estimator.Estimator(model_fn, config=config("local", train_distribute=mirrored)),
        data_input_fn,
    )
    # this one starts with the weights of linear, which has been trained
    warm = estimator.LinearClassifier(
        COLUMNS, f"{model_dir}/warm", warm_start_from=linear.model_dir
    )
    yield "warm", warm, input_fn
    keras = tf.keras.estimator.model_to_estimator(keras_model(), model_dir=f"{model_dir}/keras")
    yield "keras", keras, keras_input_fn


def main(model_dir):
    losses = {}
    for name, estimator, data in kinds(model_dir):
        estimator.train(data(), steps=1)
        before = estimator.evaluate(data(1))["loss"]
        estimator.train(data(), steps=60)
        losses[name] = [float(before), float(estimator.evaluate(data(1))["loss"])]
        if name == "warm":
            assert before < losses["linear"][0], "the weights were not taken over"
    print(json.dumps(losses))


if __name__ == "__main__":
    main(sys.argv[1])
