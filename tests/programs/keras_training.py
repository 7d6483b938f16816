"""Trains models of Keras 2 with Model.fit: without a strategy, or as a rank of a strategy.

Arguments: the directory of checkpoints, and "single" to train on the whole batch without strategy.
"""

import json
import os
import sys

import one_or_two
import tensorflow as tf
from one_or_two import DATA, RANK, SCOPE, SINGLE, STRATEGY, refusal

DIRECTORY = sys.argv[1]
X, Y = one_or_two.X.numpy(), one_or_two.Y.numpy()
keras = tf.keras
keras.backend.set_floatx("float64")  # rounding grows with momentum


class OwnStep(keras.Sequential):
    """Returns the loss of this rank instead of metrics."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - tf.cast(y, tf.float64)) ** 2)
            scaled = loss / tf.distribute.get_strategy().num_replicas_in_sync
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


def layers(*between):
    # rank 0 decides on the initial values
    first = keras.initializers.GlorotUniform(seed=1 + RANK)
    last = keras.initializers.GlorotUniform(seed=8 + RANK)
    return [
        keras.layers.Dense(7, "tanh", kernel_initializer=first),
        *between,
        keras.layers.Dense(1, kernel_initializer=last),
    ]


def trained(make_optimizer, between=(), kind=keras.Sequential, data=(DATA,), epochs=5, **options):
    with SCOPE():
        model = kind(layers(*between))
        model.compile(make_optimizer(), "mse", metrics=["mae"], **options)
    size = 16 if len(data) == 2 else None
    history = model.fit(*data, epochs=epochs, batch_size=size, verbose=0, shuffle=False)
    return model, history.history


def training_result(model, history):
    return {"history": history, "weights": [each.tolist() for each in model.get_weights()]}


def result(*args, **options):
    model, history = trained(*args, **options)
    return {
        **training_result(model, history),
        "evaluation": model.evaluate(DATA, verbose=0, return_dict=True),
        "predictions": model.predict(X, batch_size=16, verbose=0).tolist(),
    }


def checkpoints():
    """Saves with callbacks and restores: in the directory are the files of rank 0."""
    bn = keras.layers.BatchNormalization()
    model, _ = trained(lambda: keras.optimizers.Adam(0.01), [bn])
    path = os.path.join(DIRECTORY, "model.keras")
    stopping = keras.callbacks.EarlyStopping("mae", patience=1, mode="max")
    history = model.fit(
        DATA,
        epochs=5,
        verbose=0,
        callbacks=[keras.callbacks.ModelCheckpoint(path, save_weights_only=False), stopping],
    )
    own = os.path.join(DIRECTORY, f"rank_{RANK}")
    with SCOPE():
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        saved = checkpoint.save(os.path.join(own, "ckpt"))
    means = bn.moving_mean.numpy()
    weights = model.get_weights()
    model.fit(DATA, epochs=1, verbose=0)
    checkpoint.restore(saved).assert_consumed()
    same = all((a == b).all() for a, b in zip(weights, model.get_weights()))
    return {
        "epochs": len(history.history["loss"]),
        "files": sorted(
            each
            for each in os.listdir(DIRECTORY)
            if not each.startswith("rank_") and not each.endswith(".log")
        ),
        "means": means.tolist(),
        "restored": bool(same),
    }


def on_batches():
    """Calls the methods for single batches; each rank gives the whole batch."""
    with SCOPE():
        model = keras.Sequential(layers())
        model.compile(adam(), "mse", metrics=["mae"])
    batches = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 64, 16)]
    history = [model.train_on_batch(*batch, reset_metrics=False) for batch in batches]
    return {
        **training_result(model, history),
        "evaluation": model.test_on_batch(*batches[0], return_dict=True),
        "predictions": model.predict(DATA, verbose=0).tolist(),
    }


def loaded():
    """Trains a model that was saved and loaded in the scope."""
    model, _ = trained(adam)
    path = os.path.join(DIRECTORY, f"rank_{RANK}_of_{1 if SINGLE else 2}.keras")
    model.save(path)
    with SCOPE():
        model = keras.models.load_model(path)
    return training_result(model, model.fit(DATA, epochs=2, verbose=0).history)


def loss_scaled():
    model = keras.Sequential(layers())
    model.compile(keras.mixed_precision.LossScaleOptimizer(adam()), "mse")
    model.fit(DATA, verbose=0)


def uneven_rows():
    """Trains with a last batch of which rank 1 gets no row."""
    data = tf.data.Dataset.from_tensor_slices((X[:17], Y[:17])).batch(4)
    bn = keras.layers.BatchNormalization()
    _, history = trained(lambda: keras.optimizers.SGD(0.01), [bn], data=[data], epochs=2)
    return {"history": history, "means": bn.moving_mean.numpy().tolist()}


def uneven_batches():
    rows = 16 + 16 * RANK
    data = tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(8)
    trained(lambda: keras.optimizers.SGD(0.01), data=[data])


def scheduled_and_clipped():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=4, decay_rate=0.5)
    return keras.optimizers.SGD(schedule, clipnorm=0.1)


adam = lambda: keras.optimizers.Adam(0.01)  # noqa: E731
results = {
    "adam": result(adam),
    "momentum": result(lambda: keras.optimizers.SGD(0.05, momentum=0.9)),
    "legacy": result(lambda: keras.optimizers.legacy.Adam(0.01)),
    "batch norm": result(adam, [keras.layers.BatchNormalization(synchronized=True)]),
    "arrays": result(adam, data=(X, Y)),
    "own step": result(adam, kind=OwnStep),
    "several steps": result(adam, steps_per_execution=2),
    "clipped": training_result(*trained(scheduled_and_clipped)),
    "clipped together": training_result(
        *trained(lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1))
    ),
    "single batches": on_batches(),
    "loaded": loaded(),
}
if not SINGLE:
    results["checkpoints"] = checkpoints()
    results["uneven rows"] = uneven_rows()
    results["uneven batches"] = refusal(uneven_batches)
    results["xla"] = refusal(lambda: trained(adam, jit_compile=True))
    with STRATEGY.scope():
        results["loss scale"] = refusal(loss_scaled)
print("RESULT", json.dumps(results), flush=True)
