"""Trains with Model.fit until rank 1 raises an error."""

import tensorflow as tf

import estimator_ext

strategy = estimator_ext.HostOffloadStrategy()


class Fails(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if strategy.cluster.rank == 1 and batch == 3:
            raise ValueError("in step 3")


with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(3)])
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
x = tf.random.normal((64, 5))
model.fit(x, x[:, :3], batch_size=8, verbose=0, callbacks=[Fails()])
