"""A program for Horovod's Keras API, of which one line is changed: the import of hvd."""

import argparse
import os
from pathlib import Path

import numpy as np
import tensorflow as tf

import hostopt.tensorflow.keras as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--directory", required=True)
parser.add_argument("--epochs", type=int, default=6)
arguments = parser.parse_args()

hvd.init()
tf.keras.utils.set_random_seed(hvd.rank())

digits = np.load(Path(__file__).parents[2] / "examples" / "mnist" / "digits.npz")
images = (digits["images"][..., np.newaxis] / 16).astype(np.float32)
labels = digits["labels"].astype(np.int64)
train = (
    tf.data.Dataset.from_tensor_slices((images[:1600], labels[:1600]))
    .shard(hvd.size(), hvd.rank())
    .shuffle(800)
    .batch(32)
)
test = tf.data.Dataset.from_tensor_slices((images[1600:], labels[1600:])).batch(64)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(8, 3, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(32, activation="relu"),
        tf.keras.layers.Dropout(0.1),
        tf.keras.layers.Dense(10),
    ]
)
scaled_lr = 0.05 * hvd.size()
optimizer = hvd.DistributedOptimizer(
    tf.keras.optimizers.SGD(scaled_lr, momentum=0.9), backward_passes_per_step=1
)
model.compile(
    optimizer=optimizer,
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=1),
    hvd.callbacks.LearningRateScheduleCallback(scaled_lr, 0.1, start_epoch=4),
]
if hvd.rank() == 0:
    path = os.path.join(arguments.directory, "checkpoint-{epoch}.keras")
    callbacks.append(tf.keras.callbacks.ModelCheckpoint(path))
verbose = 2 if hvd.rank() == 0 else 0
history = model.fit(train, epochs=arguments.epochs, callbacks=callbacks, verbose=verbose).history

loss, accuracy = model.evaluate(test, verbose=0)
accuracy = float(hvd.allreduce(accuracy, name="accuracy"))
print(f"loss {history['loss'][-1]:.6f}, accuracy {accuracy:.4f}, lr {history['lr'][-1]:.4f}")
