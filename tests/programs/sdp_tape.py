"""A program for SageMaker's data parallel library with a gradient tape."""

import os
import sys

import numpy as np
import tensorflow as tf

import smdistributed.dataparallel.tensorflow as sdp  # isort: skip

sdp.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[sdp.local_rank()], "GPU")

directory = sys.argv[1]
data = np.load(os.path.join(directory, "data.npz"))
dataset = tf.data.Dataset.from_tensor_slices((data["x"], data["y"]))
dataset = dataset.shard(sdp.size(), sdp.rank()).repeat().batch(64 // sdp.size())

tf.random.set_seed(sdp.rank() + 1)
model = tf.keras.Sequential(
    [
        tf.keras.layers.Reshape((28, 28, 1)),
        tf.keras.layers.Conv2D(8, 5, strides=3, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy()
optimizer = tf.optimizers.SGD(0.01 * sdp.size())


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probabilities = model(images, training=True)
        loss_value = loss(labels, probabilities)
    tape = sdp.DistributedGradientTape(tape, compression=sdp.Compression.none)
    gradients = tape.gradient(loss_value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    if first_batch:
        sdp.broadcast_variables(model.variables, root_rank=0)
        sdp.broadcast_variables(optimizer.variables, root_rank=0) if not callable(
            optimizer.variables
        ) else None
    return sdp.oob_allreduce(loss_value)


for batch, (images, labels) in enumerate(dataset.take(20)):
    loss_value = training_step(images, labels, batch == 0)
    if batch % 10 == 0 and sdp.rank() == 0:
        print(f"Step #{batch}\tLoss: {loss_value:.6f}")

np.savez(os.path.join(directory, f"weights-{sdp.rank()}.npz"), *model.get_weights())
