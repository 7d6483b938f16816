"""A typical program for tf.estimator in TensorFlow 2.15; tests add one line to it, or none."""

import json
import sys

import numpy as np
import tensorflow as tf

FEATURES = ["length", "colour"]


def input_fn():
    random = np.random.RandomState(7)
    length = random.rand(240).astype(np.float32)
    colour = random.choice(["red", "green", "blue"], 240)
    label = ((length > 0.5) ^ (colour == "red")).astype(np.int64)
    data = tf.data.Dataset.from_tensor_slices(({"length": length, "colour": colour}, label))
    return data.batch(24)


def train_input_fn():
    return input_fn().repeat()


def feature_columns():
    length = tf.feature_column.numeric_column("length")
    colour = tf.feature_column.categorical_column_with_vocabulary_list(
        "colour", ["red", "green", "blue"]
    )
    halves = tf.feature_column.bucketized_column(length, [0.25, 0.5, 0.75])
    return [length, halves, tf.feature_column.embedding_column(colour, 4)]


def serving_fn():
    spec = tf.feature_column.make_parse_example_spec(feature_columns())
    return tf.estimator.export.build_parsing_serving_input_receiver_fn(spec)


def example(length, colour):
    features = {
        "length": tf.train.Feature(float_list=tf.train.FloatList(value=[length])),
        "colour": tf.train.Feature(bytes_list=tf.train.BytesList(value=[colour.encode()])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def specs(estimator, steps):
    early = tf.estimator.experimental.stop_if_no_decrease_hook(
        estimator,
        "loss",
        max_steps_without_decrease=10**6,
        run_every_secs=None,
        run_every_steps=50,
    )
    exporter = tf.estimator.BestExporter("best", serving_fn(), exports_to_keep=1)
    return (
        tf.estimator.TrainSpec(train_input_fn, max_steps=steps, hooks=[early]),
        tf.estimator.EvalSpec(
            input_fn, steps=None, exporters=exporter, start_delay_secs=0, throttle_secs=0
        ),
    )


def canned(model_dir):
    """DNNClassifier, with an exporter of the best model, loaded again as a SavedModel."""
    config = tf.estimator.RunConfig(model_dir, tf_random_seed=3, save_checkpoints_steps=150)
    classifier = tf.estimator.DNNClassifier(
        [16, 8],
        feature_columns(),
        optimizer=lambda: tf.keras.optimizers.legacy.Adam(0.02),
        config=config,
    )
    metrics, exports = tf.estimator.train_and_evaluate(classifier, *specs(classifier, 300))
    loaded = tf.saved_model.load(exports[0].decode())
    served = loaded.signatures["predict"](examples=tf.constant([example(0.9, "red")]))
    (predicted, *_) = classifier.predict(
        lambda: tf.data.Dataset.from_tensors({"length": [0.9], "colour": ["red"]})
    )
    np.testing.assert_allclose(
        served["probabilities"][0], predicted["probabilities"], rtol=0, atol=1e-6
    )
    return metrics


def custom(model_dir):
    """A custom model_fn with early stopping on its loss."""

    def model_fn(features, labels, mode, params):
        inputs = tf.compat.v1.feature_column.input_layer(features, feature_columns())
        hidden = tf.keras.layers.Dense(params["units"], activation="relu")(inputs)
        logits = tf.compat.v1.layers.dense(hidden, 2)
        classes = tf.argmax(logits, axis=1)
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions={"class": classes})
        loss = tf.compat.v1.losses.sparse_softmax_cross_entropy(labels, logits)
        if mode == tf.estimator.ModeKeys.EVAL:
            accuracy = tf.compat.v1.metrics.accuracy(labels, classes)
            return tf.estimator.EstimatorSpec(
                mode, loss=loss, eval_metric_ops={"accuracy": accuracy}
            )
        optimizer = tf.compat.v1.train.AdamOptimizer(0.02)
        train_op = optimizer.minimize(loss, tf.compat.v1.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    config = tf.estimator.RunConfig(tf_random_seed=3, save_checkpoints_steps=100)
    estimator = tf.estimator.Estimator(model_fn, model_dir, config, params={"units": 16})
    stop = tf.estimator.experimental.stop_if_higher_hook(
        estimator, "accuracy", 0.9, run_every_secs=None, run_every_steps=100
    )
    evaluation = tf.estimator.experimental.InMemoryEvaluatorHook(
        estimator, input_fn, every_n_iter=100
    )
    estimator.train(train_input_fn, hooks=[evaluation, stop], max_steps=5000)
    return estimator.evaluate(input_fn)


def main(model_dir):
    tf.keras.utils.set_random_seed(3)
    results = {"canned": canned(model_dir + "/canned"), "custom": custom(model_dir + "/custom")}
    print("RESULT", json.dumps(results, default=float))


if __name__ == "__main__":
    main(sys.argv[1])
