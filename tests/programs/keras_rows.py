"""Counts how often Model.fit of Keras 2 reads each row, in each epoch, on two ranks.

Arguments: a directory; "single" to train without a strategy, and "generator" to end with an error.
"""

import json
import sys

import numpy as np
import tensorflow as tf
from one_or_two import RANK, SCOPE, SINGLE, STRATEGY, refusal

keras = tf.keras
ROWS, EPOCHS = 64, 2
X = np.arange(ROWS, dtype=np.float32)[:, None]


class Counts(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="counts")
        total = tf.VariableAggregation.SUM
        self.counts = self.add_weight("counts", [ROWS], initializer="zeros", aggregation=total)

    def update_state(self, y, predictions, sample_weight=None):
        rows = tf.one_hot(tf.cast(y[:, 0], tf.int32), ROWS)
        self.counts.assign_add(tf.reduce_sum(rows, 0))

    def reset_state(self):
        self.counts.assign(tf.zeros([ROWS]))

    def result(self):
        return tf.reduce_sum(tf.cast(tf.equal(self.counts, 1), tf.float32))


class First(keras.callbacks.Callback):
    """Notes the first loss of each epoch, which shows the order of the rows."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self.losses.append(logs["loss"])


def fit(*data, **options):
    with SCOPE():
        model = keras.Sequential([keras.layers.Dense(1, input_shape=(1,))])
        model.compile(keras.optimizers.legacy.SGD(0.0), "mse", metrics=[Counts()])
    first = First()
    history = [
        model.fit(*data, epochs=EPOCHS, verbose=0, callbacks=[first], **options).history["counts"]
        for _ in range(2)
    ]
    return {"once": history, "orders": len(set(first.losses))}


def sliced():
    return tf.data.Dataset.from_tensor_slices((X, X))


class Sequence(keras.utils.Sequence):
    def __len__(self):
        return ROWS // 16

    def __getitem__(self, index):
        rows = X[16 * index : 16 * index + 16]
        return rows, rows


def generated():
    for rows in np.random.default_rng().permutation(X.reshape(-1, 16)):
        yield rows[:, None], rows[:, None]


results = {
    "arrays": fit(X, X, batch_size=16),
    "batches of arrays": fit(X, X, batch_size=16, shuffle="batch"),
    "tensors": fit(tf.constant(X), tf.constant(X), batch_size=16),
    "shuffle": fit(sliced().shuffle(ROWS).batch(16)),
    "sequence": fit(Sequence(), shuffle=False),
}
if not SINGLE:
    results["seed"] = fit(sliced().shuffle(ROWS, seed=3).batch(16))
    results["other rows"] = refusal(lambda: fit(X + RANK, X, batch_size=16))
    results["other seed"] = refusal(lambda: fit(sliced().shuffle(ROWS, seed=RANK).batch(16)))
    noise = tf.keras.layers.Dropout(0.5)
    draw = tf.function(lambda: STRATEGY.run(lambda: noise(tf.ones([64]), training=True)))
    results["dropout"] = draw().numpy().tolist()
if "generator" in sys.argv:
    fit(generated(), steps_per_epoch=4)
print("RESULT", json.dumps(results), flush=True)
