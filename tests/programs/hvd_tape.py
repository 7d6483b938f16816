"""A program for Horovod with a gradient tape: variables of rank 0, and its checkpoint."""

import os
import sys

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd  # isort: skip

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

directory = sys.argv[1]
data = np.load(os.path.join(directory, "data.npz"))
dataset = tf.data.Dataset.from_tensor_slices((data["x"], data["y"]))
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().batch(64 // hvd.size())

tf.random.set_seed(hvd.rank() + 1)
model = tf.keras.Sequential(
    [
        tf.keras.layers.Reshape((28, 28, 1)),
        tf.keras.layers.Conv2D(8, 5, strides=3, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy()
optimizer = tf.optimizers.Adam(0.001 * hvd.size())
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probabilities = model(images, training=True)
        loss_value = loss(labels, probabilities)
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss_value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        optimizer_variables = optimizer.variables
        if callable(optimizer_variables):
            optimizer_variables = optimizer_variables()
        hvd.broadcast_variables(optimizer_variables, root_rank=0)
    return loss_value


for batch, (images, labels) in enumerate(dataset.take(20)):
    loss_value = training_step(images, labels, batch == 0)
    if batch % 10 == 0 and hvd.local_rank() == 0:
        print(f"Step #{batch}\tLoss: {loss_value:.6f}")

np.savez(os.path.join(directory, f"weights-{hvd.rank()}.npz"), *model.get_weights())
if hvd.rank() == 0:
    checkpoint.save(os.path.join(directory, "checkpoints", "model"))
