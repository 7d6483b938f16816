"""Trains a digit classifier on one or more ranks, on MNIST or similar data."""

from __future__ import annotations

import argparse
import time
from typing import Any, Callable

import data
import numpy as np
import tensorflow as tf

import estimator_ext

estimator_ext.install()

SEED = 1
EVAL_BATCH = 500
SHOWN = 16


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data-dir", help="directory of the four MNIST IDX files, plain or .gz")
    parser.add_argument(
        "--model-dir",
        default="./mnist_model",
        help="directory of checkpoints and logs, the same for all processes; kept between runs",
    )
    parser.add_argument("--batch-size", type=int, default=64, help="images per rank and step")
    parser.add_argument("--steps", type=int, default=1500, help="global step at which to stop")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--hidden", type=int, default=64, help="units of the dense layer")
    parser.add_argument("--bucket-mb", type=float, help="size of a gradient bucket, in MiB")
    return parser.parse_args()


def logits_of(images: tf.Tensor, hidden: int) -> tf.Tensor:
    """Maps images, float32 [n, 28, 28, 1], to logits, float32 [n, 10]."""
    layers = tf.keras.layers
    x = layers.Conv2D(32, 3, activation="relu")(images)
    x = layers.MaxPooling2D()(x)
    x = layers.Flatten()(x)
    x = layers.Dense(hidden, activation="relu")(x)
    return layers.Dense(data.CLASSES)(x)


def make_model_fn(learning_rate: float, hidden: int) -> Callable[..., Any]:
    """Returns the model_fn of the Estimator, with these hyperparameters."""

    def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
        logits = logits_of(features, hidden)
        classes = tf.argmax(logits, axis=1)

        if mode == tf.estimator.ModeKeys.PREDICT:
            predictions = {"classes": classes, "probabilities": tf.nn.softmax(logits)}
            return estimator_ext.EstimatorSpec(mode=mode, predictions=predictions)

        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        # the mean over the local batch; the framework averages gradients over the ranks
        loss = tf.reduce_sum(losses) / tf.cast(tf.size(labels), tf.float32)

        if mode == tf.estimator.ModeKeys.EVAL:
            accuracy = tf.compat.v1.metrics.accuracy(labels=labels, predictions=classes)
            return estimator_ext.EstimatorSpec(
                mode=mode, loss=loss, eval_metric_ops={"accuracy": accuracy}
            )

        optimizer = tf.compat.v1.train.AdamOptimizer(learning_rate)
        variables = tf.compat.v1.trainable_variables()

        def host_model_fn(*host_gradients: tf.Tensor) -> tf.Operation:
            # on the host: all-reduce and update; the Estimator increments the global step
            return optimizer.apply_gradients(zip(host_gradients, variables))

        grads = [g for g, _ in optimizer.compute_gradients(loss, var_list=variables)]
        return estimator_ext.EstimatorSpec(
            mode=mode, loss=loss, train_op=tf.identity(loss), host_call=(host_model_fn, grads)
        )

    return model_fn


def dataset_of(images: np.ndarray, labels: np.ndarray) -> tf.data.Dataset:
    """Returns a dataset of single images.

    from_tensor_slices would write all images into the graph, and so into each checkpoint and event
    file. Here one Python call passes the arrays, and `unbatch` splits them in C++.
    """
    signature = (
        tf.TensorSpec([None, data.SIDE, data.SIDE], tf.uint8),
        tf.TensorSpec([None], tf.uint8),
    )
    whole = tf.data.Dataset.from_generator(
        lambda: iter([(images, labels)]), output_signature=signature
    )
    return whole.unbatch()


def normalise(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Maps uint8 [n, 28, 28] to float32 [n, 28, 28, 1] in [0, 1], and labels to int64."""
    return tf.cast(images[..., tf.newaxis], tf.float32) / 255, tf.cast(labels, tf.int64)


def make_train_input_fn(digits: data.Digits, batch_size: int) -> Callable[..., tf.data.Dataset]:
    def input_fn(input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        context = input_context or tf.distribute.InputContext()
        # shuffles indices instead of images, as checkpoints contain the state of the dataset
        rows = tf.data.Dataset.range(len(digits.x_train))
        rows = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
        rows = rows.shuffle(len(digits.x_train), seed=SEED + context.input_pipeline_id).repeat()
        rows = rows.batch(batch_size, drop_remainder=True)
        return rows.map(pick).map(normalise).prefetch(2)

    def pick(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        def take(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return digits.x_train[rows], digits.y_train[rows]

        images, labels = tf.numpy_function(take, [rows], [tf.uint8, tf.uint8], stateful=False)
        images.set_shape([batch_size, data.SIDE, data.SIDE])
        labels.set_shape([batch_size])
        return images, labels

    return input_fn


def make_test_input_fn(images: np.ndarray, labels: np.ndarray) -> Callable[..., tf.data.Dataset]:
    def input_fn(input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        context = input_context or tf.distribute.InputContext()
        dataset = dataset_of(images, labels).batch(EVAL_BATCH)
        # each evaluator reads its shard of the batches; metrics are summed over the evaluators
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.map(normalise).prefetch(2)

    return input_fn


class StepRate(tf.estimator.SessionRunHook):
    """Measures steps per second, without the first step and without the time between steps.

    Checkpoints and evaluations happen between steps.
    """

    def __init__(self) -> None:
        self._first_step: int | None = None
        self._steps = 0
        self._seconds = 0.0

    def begin(self) -> None:
        self._global_step = tf.compat.v1.train.get_global_step()

    def before_run(self, run_context: Any) -> tf.estimator.SessionRunArgs:
        self._started = time.perf_counter()
        return tf.estimator.SessionRunArgs(self._global_step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        step = int(run_values.results)
        if self._first_step is None:
            self._first_step = step
            return
        self._steps = step - self._first_step
        self._seconds += time.perf_counter() - self._started

    def __str__(self) -> str:
        if self._first_step is None:
            return "no steps, as the model directory already has that many"
        if not self._steps:
            return "a single step, which is too short to measure"
        return f"{self._steps / self._seconds:.1f} steps/s"


def make_estimator(args: argparse.Namespace) -> tf.estimator.Estimator:
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    options = {} if args.bucket_mb is None else {"bucket_mb": args.bucket_mb}
    tf.keras.utils.set_random_seed(SEED)  # the layers' initial values
    strategy = estimator_ext.HostOffloadStrategy(cluster, variables_on_host=True, **options)
    config = estimator_ext.RunConfig(
        train_distribute=strategy,
        session_config=tf.compat.v1.ConfigProto(allow_soft_placement=False),
        tf_random_seed=SEED,
        save_checkpoints_steps=250,
        save_summary_steps=100,
        log_step_count_steps=100,
    )
    return estimator_ext.Estimator(
        model_fn=make_model_fn(args.learning_rate, args.hidden),
        config=config,
        model_dir=args.model_dir,
    )


def report(
    classifier: tf.estimator.Estimator, digits: data.Digits, accuracy: float, rate: StepRate
) -> None:
    shown = make_test_input_fn(digits.x_test[:SHOWN], digits.y_test[:SHOWN])
    predicted = [int(p["classes"]) for p in classifier.predict(shown)]
    print(f"predicted {predicted}, true {digits.y_test[:SHOWN].tolist()}")
    print(f"test accuracy: {accuracy:.4f}")
    print(f"training: {rate}")
    print(f"checkpoint: {classifier.latest_checkpoint()}")
    print(f"logs: tensorboard --logdir {classifier.model_dir}", flush=True)


def main() -> None:
    args = parse_args()
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)
    try:
        digits = data.load(args.data_dir)
    except data.DataError as error:
        raise SystemExit(f"data: {error}") from error
    print(f"data: {digits.source}", flush=True)

    classifier = make_estimator(args)
    rate = StepRate()
    train_input_fn = make_train_input_fn(digits, args.batch_size)
    test_input_fn = make_test_input_fn(digits.x_test, digits.y_test)
    result = estimator_ext.train_and_evaluate(
        classifier,
        tf.estimator.TrainSpec(train_input_fn, max_steps=args.steps, hooks=[rate]),
        tf.estimator.EvalSpec(test_input_fn, steps=None, start_delay_secs=0, throttle_secs=1),
    )
    if not classifier.config.is_chief:
        return
    # if there is an evaluator, only its process has the metrics
    metrics = (result and result[0]) or classifier.evaluate(test_input_fn)
    report(classifier, digits, float(metrics["accuracy"]), rate)


if __name__ == "__main__":
    main()
