"""Checks that two ranks train models of Keras as one process does on the whole batch.

Arguments: the module of Horovod's API, and a directory that all ranks share.
"""

import importlib
import os
import sys

import numpy as np
import tensorflow as tf

import hostopt

STEPS, BATCH, TOKENS, ROWS = 20, 8, 2, 64

hvd = importlib.import_module(sys.argv[1])
directory = sys.argv[2]
is_keras_3 = sys.argv[1] == "hostopt.keras"
keras = importlib.import_module("keras") if is_keras_3 else tf.keras
hvd.init()


def data(repeated, seed=3):
    """Returns tokens [STEPS * BATCH, TOKENS] and targets; a batch has a token once or often."""
    random = np.random.default_rng(seed)
    count = STEPS * BATCH
    if repeated:
        tokens = random.integers(0, 5, (count, TOKENS))
    else:
        batches = [random.permutation(ROWS)[: BATCH * TOKENS] for _ in range(STEPS)]
        tokens = np.concatenate(batches).reshape(count, TOKENS)
    return tokens, random.normal(size=(count, 1)).astype(np.float32)


def new_model():
    keras.utils.set_random_seed(5)
    inputs = keras.Input((TOKENS,), dtype="int32")
    outputs = keras.layers.Flatten()(keras.layers.Embedding(ROWS, 4)(inputs))
    outputs = keras.layers.Dense(8, activation="tanh")(outputs)
    return keras.Model(inputs, keras.layers.Dense(1)(outputs))


def fit(model, x, y, parts=1, batch=BATCH):
    """Trains on this rank's part of each batch."""
    part = slice(hvd.rank() if parts > 1 else 0, None, parts)
    model.fit(x[part], y[part], batch_size=batch // parts, shuffle=False, verbose=0)


def check_equal(name, actual, expected):
    for one, other in zip(actual.get_weights(), expected.get_weights()):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5, err_msg=name)
    print(f"equal: {name}", flush=True)


def check_optimizer(name, make, run_eagerly=False):
    x, y = data(repeated=False)
    whole, shared = new_model(), new_model()
    whole.compile(make(), "mse")
    fit(whole, x, y)
    shared.compile(hvd.DistributedOptimizer(make()), "mse", run_eagerly=run_eagerly)
    fit(shared, x, y, hvd.size())
    check_equal(name, shared, whole)


def check_passes(name, make):
    """Checks that two batches whose gradients are averaged are like one of twice the size."""
    x, y = data(True)
    whole, shared = new_model(), new_model()
    whole.compile(make(), "mse")
    fit(whole, x, y, batch=2 * BATCH)
    optimizer = hvd.DistributedOptimizer(
        make(), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    shared.compile(optimizer, "mse")
    fit(shared, x, y, hvd.size())
    check_equal(name, shared, whole)


def check_unused(name, make):
    """Checks that a variable without a gradient changes nothing, and the others by their own."""
    optimizer = hvd.DistributedOptimizer(make(), backward_passes_per_step=2)
    values = [tf.zeros(3), tf.ones(3), tf.fill([3], 2.0)]
    kind = keras.Variable if is_keras_3 else tf.Variable
    variables = [kind(np.zeros(3, np.float32)) for _ in values]
    for _ in range(2):
        optimizer.apply_gradients(zip([None, *values[1:]], variables))
    for variable, value in zip(variables, values):
        assert np.array_equal(variable.numpy(), -2 * value), name
    print(f"equal: {name}", flush=True)


def check_loaded(name, make, suffix):
    """Checks that a model that is saved and loaded again continues as if it was not."""
    x, y = data(False)
    half = STEPS // 2 * BATCH
    whole, shared = new_model(), new_model()
    whole.compile(make(), "mse")
    fit(whole, x, y)
    shared.compile(hvd.DistributedOptimizer(make()), "mse")
    fit(shared, x[:half], y[:half], hvd.size())
    path = os.path.join(directory, f"{name.replace(' ', '_')}{suffix}")
    if hvd.rank() == 0:
        shared.save(path)
    hvd.allreduce(0.0, name="saved")
    plain = keras.models.load_model(path)
    assert "_hostopt" not in vars(type(plain.optimizer))
    loaded = hvd.load_model(path)
    assert type(loaded.optimizer).__name__ == type(make()).__name__
    fit(loaded, x[half:], y[half:], hvd.size())
    check_equal(name, loaded, whole)


def check_changed_gradients(name, sgd, is_new):
    """Checks gradients of `compute_gradients` or a tape that the program itself applies.

    Those of `compute_gradients` are clipped. The program may also say that they are reduced.
    """
    random = np.random.default_rng(7)
    x, y = (random.normal(size=(16, n)).astype(np.float32) for n in (3, 1))
    part = slice(hvd.rank(), None, hvd.size())
    told = {"skip_gradients_aggregation": True}
    if not is_new:
        told = {"experimental_aggregate_gradients": False}

    def train(optimizer, x, y, way, is_eager, factor=1.0, **arguments):
        variable = tf.Variable(tf.zeros([3, 1]))

        def loss():
            return factor * tf.reduce_mean((tf.matmul(x, variable) - y) ** 2)

        def step():
            if way == "tape":
                with tf.GradientTape() as tape:
                    value = loss()
                gradients = tape.gradient(value, [variable])
            else:
                compute = optimizer.compute_gradients if is_new else optimizer._compute_gradients
                gradients = [gradient for gradient, _ in compute(loss, [variable])]
                gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
            optimizer.apply_gradients(zip(gradients, [variable]), **arguments)

        run = step if is_eager else tf.function(step)
        for _ in range(10):
            run()
        return variable.numpy()

    for way in ("tape", "computed"):
        whole = train(sgd(), x, y, way, True)
        for is_eager in (True, False):
            for arguments in ({}, told):
                own = hvd.DistributedOptimizer(sgd())
                shared = train(own, x[part], y[part], way, is_eager, **arguments)
                np.testing.assert_allclose(shared, whole, rtol=0, atol=1e-5, err_msg=way)
    whole = train(sgd(), x, y, "computed", True, factor=hvd.size())
    own = hvd.DistributedOptimizer(sgd(), op=hvd.Sum)
    shared = train(own, x[part], y[part], "computed", False)
    np.testing.assert_allclose(shared, whole, rtol=0, atol=1e-5)
    if hvd.size() > 1:
        try:
            train(own, x, y, "computed", True)
            raise AssertionError("not refused")
        except hostopt.ConfigError as error:
            assert "may be reduced already" in str(error)
    print(f"equal: {name}", flush=True)


def check_family(prefix, optimizers, suffix):
    def clipped():
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
        return optimizers.SGD(schedule, clipnorm=0.05)

    def momentum():
        return optimizers.SGD(0.05, momentum=0.9, nesterov=True)

    check_optimizer(f"{prefix} clipnorm and schedule", clipped, run_eagerly=prefix == "new")
    check_optimizer(f"{prefix} global_clipnorm", lambda: optimizers.Adam(global_clipnorm=0.1))
    check_passes(f"{prefix} repeated rows in two passes", momentum)
    check_unused(f"{prefix} unused variable in two passes", lambda: optimizers.SGD(1.0))
    if not is_keras_3:
        name = f"{prefix} changed gradients"
        check_changed_gradients(name, lambda: optimizers.SGD(0.1), prefix == "new")
    check_loaded(f"{prefix} loaded", lambda: optimizers.Adam(0.01), suffix)


check_family("new", keras.optimizers, ".keras")
if not is_keras_3:
    check_family("legacy", keras.optimizers.legacy, ".h5")
