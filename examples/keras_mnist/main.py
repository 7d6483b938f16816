"""Trains a convolutional network on MNIST with Keras, on one or more workers.

python examples/keras_mnist/main.py
hostopt run -np 2 -- python examples/keras_mnist/main.py
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # Keras 2, as `hostopt run` sets it

import tensorflow as tf

import hostopt.tensorflow.keras as hvd

sys.path.append(str(Path(__file__).parents[1] / "mnist"))
import data


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data-dir", help="directory of the four MNIST IDX files, plain or .gz")
    parser.add_argument("--output", type=Path, default="keras_mnist_output", help="directory")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--warmup-epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="images per worker and step")
    parser.add_argument("--learning-rate", type=float, default=0.01, help="for one worker")
    return parser.parse_args()


def make_model():
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input([data.SIDE, data.SIDE, 1]),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(data.CLASSES),
        ]
    )


def normalise(images, labels):
    """Maps uint8 [n, 28, 28] to float32 [n, 28, 28, 1] in [0, 1]; labels stay."""
    return tf.cast(images[..., tf.newaxis], tf.float32) / 255, labels


def make_datasets(digits, batch_size):
    """Returns endless batches of this worker's training images, and its test images."""

    def shard(images, labels):
        images_and_labels = tf.data.Dataset.from_tensor_slices((images, labels))
        return images_and_labels.shard(hvd.size(), hvd.rank())

    train = shard(digits.x_train, digits.y_train).shuffle(10_000).repeat().batch(batch_size)
    test = shard(digits.x_test, digits.y_test).batch(500)
    return train.map(normalise), test.map(normalise)


def make_callbacks(args, learning_rate):
    callbacks = [
        # all workers begin with the variables of rank 0
        hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0),
        # the learning rate rises from that for one worker to `learning_rate`
        hvd.callbacks.LearningRateWarmupCallback(learning_rate, args.warmup_epochs),
        # each worker measures its own shard
        hvd.callbacks.MetricAverageCallback(),
    ]
    if hvd.rank() == 0:  # all workers have the same variables, so one saves them
        checkpoint = str(args.output / "model.weights.h5")
        callbacks.append(tf.keras.callbacks.ModelCheckpoint(checkpoint, save_weights_only=True))
    return callbacks


def main():
    args = parse_args()
    hvd.init()
    tf.keras.utils.set_random_seed(10 + hvd.rank())  # another run has the same results
    digits = data.load(args.data_dir)
    train, test = make_datasets(digits, args.batch_size)
    if hvd.rank() == 0:
        print(f"data: {digits.source}", flush=True)
        args.output.mkdir(parents=True, exist_ok=True)

    # a batch of all workers is `size` times as large, and allows a larger learning rate
    learning_rate = args.learning_rate * hvd.size()
    optimizer = tf.keras.optimizers.SGD(learning_rate, momentum=0.9)
    model = make_model()
    model.compile(
        # averages the gradients of all workers before it applies them
        hvd.DistributedOptimizer(optimizer),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        train,
        epochs=args.epochs,
        # the same number on all workers, even if their shards differ by an image
        steps_per_epoch=len(digits.x_train) // (args.batch_size * hvd.size()),
        validation_data=test,
        callbacks=make_callbacks(args, learning_rate),
        verbose=2 if hvd.rank() == 0 else 0,
    ).history

    last = ", ".join(f"{name} {values[-1]:.4f}" for name, values in history.items())
    print(f"rank {hvd.rank()}: {last}", flush=True)
    if hvd.rank() == 0:
        metrics = {name: [float(value) for value in values] for name, values in history.items()}
        numbers = json.dumps({"workers": hvd.size(), "metrics": metrics})
        (args.output / "history.json").write_text(numbers)


if __name__ == "__main__":
    main()
