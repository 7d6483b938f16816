"""A model_fn of tf-slim: layers with batch norm, create_train_op, averages, a Scaffold."""

import numpy as np
import tensorflow as tf
import tf_slim as slim
from arguments import read_arguments

# Eight patterns repeat with different labels, so that batches of all sizes have the same
# statistics.
DESIGNS, FEATURES, CLASSES, ROWS = 8, 12, 4, 512


def read_data():
    random = np.random.RandomState(5)
    designs = random.standard_normal((DESIGNS, FEATURES)).astype(np.float32)
    labels = (np.arange(ROWS) + random.randint(0, 2, ROWS)) % CLASSES
    return {"x": np.tile(designs, (ROWS // DESIGNS, 1))}, labels


def network(x, is_training):
    norm = {"is_training": is_training, "decay": 0.9, "scale": True}
    with slim.arg_scope(
        [slim.fully_connected],
        weights_regularizer=slim.l2_regularizer(1e-3),
        normalizer_fn=slim.batch_norm,
        normalizer_params=norm,
    ):
        net = slim.stack(x, slim.fully_connected, [16, 16], scope="hidden")
    return slim.fully_connected(net, CLASSES, activation_fn=None, scope="logits")


def model_fn(features, labels, mode):
    v1 = tf.compat.v1
    logits = network(features["x"], mode == tf.estimator.ModeKeys.TRAIN)
    predictions = {"class": tf.argmax(logits, 1), "probabilities": tf.nn.softmax(logits)}
    average = tf.train.ExponentialMovingAverage(0.9, v1.train.get_or_create_global_step())
    if mode == tf.estimator.ModeKeys.TRAIN:
        v1.losses.sparse_softmax_cross_entropy(labels, logits)
        loss = v1.losses.get_total_loss()
        rate = v1.train.exponential_decay(0.05, v1.train.get_global_step(), 5, 0.9)
        optimizer = v1.train.MomentumOptimizer(rate, 0.9)
        train_op = slim.learning.create_train_op(loss, optimizer, clip_gradient_norm=0.1)
        with tf.control_dependencies([train_op]):
            train_op = average.apply(slim.get_model_variables())
        scaffold = v1.train.Scaffold(saver=v1.train.Saver(max_to_keep=5))
        return tf.estimator.EstimatorSpec(mode, predictions, loss, train_op, scaffold=scaffold)
    saver = v1.train.Saver(average.variables_to_restore(slim.get_model_variables()))
    scaffold = v1.train.Scaffold(saver=saver)
    if mode == tf.estimator.ModeKeys.PREDICT:
        outputs = {"serving_default": tf.estimator.export.PredictOutput(predictions)}
        return tf.estimator.EstimatorSpec(
            mode, predictions, scaffold=scaffold, export_outputs=outputs
        )
    loss = v1.losses.sparse_softmax_cross_entropy(labels, logits)
    metrics = {"accuracy": v1.metrics.accuracy(labels, predictions["class"])}
    return tf.estimator.EstimatorSpec(
        mode, predictions, loss, eval_metric_ops=metrics, scaffold=scaffold
    )


def main():
    args = read_arguments()
    features, labels = read_data()

    def train_input_fn():
        data = tf.data.Dataset.from_tensor_slices((features, labels))
        return data.repeat().batch(args.batch_size)

    def eval_input_fn():
        return tf.data.Dataset.from_tensor_slices((features, labels)).batch(64)

    config = tf.estimator.RunConfig(tf_random_seed=11)
    estimator = tf.estimator.Estimator(model_fn, args.model_dir, config)
    estimator.train(train_input_fn, max_steps=args.steps)
    print("METRICS", estimator.evaluate(eval_input_fn))
    print("PREDICTED", len(list(estimator.predict(eval_input_fn, "class"))))

    def serving():
        x = tf.compat.v1.placeholder(tf.float32, [None, FEATURES])
        return tf.estimator.export.ServingInputReceiver({"x": x}, {"x": x})

    print("EXPORTED", estimator.export_saved_model(f"{args.model_dir}/export", serving))


if __name__ == "__main__":
    main()
