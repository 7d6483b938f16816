"""Checks the callbacks, and loss scales, on two ranks.

Argument: the module of Horovod's API.
"""

import importlib
import os
import sys
import tempfile

import numpy as np
import tensorflow as tf

from hostopt.errors import ConfigError

hvd = importlib.import_module(sys.argv[1])
is_keras_3 = sys.argv[1] == "hostopt.keras"
keras = importlib.import_module("keras") if is_keras_3 else tf.keras
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
OPTIMIZERS = {"new": keras.optimizers}
if not is_keras_3:
    OPTIMIZERS["legacy"] = keras.optimizers.legacy
ONES = np.ones((6, 1), np.float32)


def passed(name):
    print(f"passed: {name}", flush=True)


def new_model(*layers, shape=(1,)):
    return keras.Sequential([keras.Input(shape), *layers])


def values_of(model):
    variables = model.optimizer.variables
    variables = variables() if callable(variables) else variables
    return [np.asarray(each) for each in [*model.weights, *variables]]


def check_same(model):
    """Checks that weights and slots are the same on all ranks, and not all of them 0."""
    gathered = hvd.allgather_object(values_of(model))
    assert len(gathered[0]) > len(model.weights)
    for each in gathered[1:]:
        for one, other in zip(gathered[0], each):
            np.testing.assert_array_equal(one, other)


def refused(function):
    try:
        function()
    except ConfigError as error:
        return str(error)
    raise AssertionError("not refused")


def fit(model, callbacks=(), x=ONES, y=ONES, epochs=1, batch_size=2, **arguments):
    arguments = {"verbose": 0, "shuffle": False, **arguments}
    return model.fit(
        x, y, epochs=epochs, batch_size=batch_size, callbacks=list(callbacks), **arguments
    )


def check_broadcast_before_training(name, optimizers):
    """Checks the values of rank 1, whose optimizer has no slots until the broadcast makes them."""
    keras.utils.set_random_seed(RANK)
    model = new_model(keras.layers.Dense(3), keras.layers.Dense(1))
    model.compile(optimizers.Adam(0.0), "mse")
    if RANK == 1:
        fit(model)  # fills the slots of this rank
    model.compile(hvd.DistributedOptimizer(model.optimizer), "mse")
    expected = hvd.broadcast_object(values_of(model) if RANK == 1 else None, root_rank=1)

    class Check(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 0:
                for one, other in zip(values_of(self.model), expected):
                    np.testing.assert_array_equal(one, other)
                check_same(self.model)
                passed(f"{name} broadcast before training")

    fit(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(1), Check()])
    assert any(np.any(each) for each in values_of(model)[len(model.weights) + 2 :])


def check_broadcast_after_first_batch(name, optimizers):
    keras.utils.set_random_seed(RANK)
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(optimizers.SGD(0.1, 0.5)), "mse", run_eagerly=True)
    fit(model, [hvd.BroadcastGlobalVariablesCallback()])
    check_same(model)
    passed(f"{name} broadcast after the first batch")


def check_loaded_on_rank_0(name, optimizers):
    """Checks that rank 0 resumes a model from a file, while the other rank builds it."""
    model = new_model(keras.layers.Dense(3, name="first"), keras.layers.Dense(1, name="last"))
    own = type(f"SGDOf{name}", (optimizers.SGD,), {})
    keras.saving.register_keras_serializable("tests")(own)
    model.compile(hvd.DistributedOptimizer(own(0.1)), "mse")
    if RANK == 0:
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "model.keras")
            model.save(path)
            model = hvd.load_model(path)
            assert isinstance(model.optimizer, own)
    else:
        model.compile(hvd.DistributedOptimizer(own(0.1)), "mse")
    fit(model, [hvd.BroadcastGlobalVariablesCallback(0)])
    check_same(model)
    passed(f"{name} loaded on rank 0")


def check_local_layers(family, classes):
    """Checks that a layer that is local to each rank keeps its own values and gradients."""
    local, shared = keras.layers.Dense(1), keras.layers.Dense(1, use_bias=False)
    model = new_model(local, shared)
    model.set_weights([np.array(each) for each in ([[RANK + 1.0]], [0.0], [[1.0]])])
    optimizer = hvd.PartialDistributedOptimizer(classes.SGD(1.0), local_layers=[local])
    model.compile(optimizer, "mae")  # the gradient of the loss is -1 below the targets
    kernel, bias = local.trainable_variables
    broadcast = hvd.BroadcastGlobalVariablesCallback(0, local_variables=[bias])
    broadcast.register_local_var(kernel)
    fit(model, [broadcast], y=ONES * 10, batch_size=6)
    own, all_ = RANK + 1.0, [1.0, 2.0]
    expected = [[[own + 1 / SIZE]], [1 / SIZE], [[1 + sum(all_) / SIZE]]]
    for weight, wanted in zip(model.get_weights(), expected):
        np.testing.assert_allclose(weight, wanted, rtol=1e-6)
    passed(f"{family} local layers")


def check_metrics():
    keras.utils.set_random_seed(1)
    model = new_model(keras.layers.Dense(1))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse", metrics=["mae"])
    y = np.full((6, 1), 10.0 * RANK, np.float32)
    own = {key: values[0] for key, values in fit(model, y=y).history.items()}
    gathered = hvd.allgather_object(own)
    assert gathered[0]["loss"] != gathered[1]["loss"]
    seen = {}

    class Later(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.update(logs)

    history = fit(model, [hvd.MetricAverageCallback(), Later()], y=y).history
    for name in ("loss", "mae"):
        expected = np.mean([each[name] for each in gathered])
        np.testing.assert_allclose(history[name][0], expected, rtol=1e-6)
        assert seen[name] == history[name][0]
    message = refused(
        lambda: hvd.MetricAverageCallback().on_epoch_end(0, {"loss": 1.0, f"mae_{RANK}": 2.0})
    )
    assert "rank" in message
    passed("metrics")


class Rates(keras.callbacks.Callback):
    """Remembers the learning rate of each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(float(np.asarray(self.model.optimizer.learning_rate)))


def check_schedules(name, optimizers):
    """Checks learning rates, momentum and weights of a loss whose gradient is always 1.

    Three batches in each of four epochs. Warm-up to 0.4 takes two epochs; epoch 3 has a tenth.
    """
    model = new_model(keras.layers.Dense(1, use_bias=False))
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(0.4, momentum=0.5))
    model.compile(optimizer, lambda y, predicted: predicted)
    model.set_weights([np.zeros((1, 1), np.float32)])
    rates = Rates()
    warmup = hvd.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1)
    schedule = hvd.LearningRateScheduleCallback(0.4, lambda epoch: 0.1, start_epoch=3)
    history = fit(model, [warmup, schedule, rates], epochs=4).history
    expected = [0.2 + 0.2 * step / 6 for step in (1, 2, 3, 4, 5, 6)] + [0.4] * 3 + [0.04] * 3
    np.testing.assert_allclose(rates.seen, expected, rtol=1e-6)
    np.testing.assert_allclose(history["lr"], [0.3, 0.4, 0.4, 0.04], rtol=1e-6)
    weight, velocity, old = 0.0, 0.0, 0.4
    for rate in expected:
        velocity = 0.5 * rate / old * velocity - rate
        weight, old = weight + velocity, rate
    np.testing.assert_allclose(model.get_weights()[0], [[weight]], rtol=1e-5)
    assert float(np.asarray(optimizer.get_config()["momentum"])) == 0.5
    passed(f"{name} schedules")


def check_staircase(name, optimizers):
    model = new_model(keras.layers.Dense(1))
    model.compile(hvd.DistributedOptimizer(optimizers.RMSprop(1.0, momentum=0.5)), "mse")
    rates = Rates()

    def multiplier(epoch):
        return 2.0**-epoch

    schedule = hvd.LearningRateScheduleCallback(0.1, multiplier, staircase=False)
    fit(model, [schedule, rates], epochs=2)
    np.testing.assert_allclose(rates.seen, [0.1 * 2 ** -(k / 3) for k in range(6)], rtol=1e-6)
    rates.seen.clear()
    schedule = hvd.LearningRateScheduleCallback(0.1, multiplier, end_epoch=1)
    fit(model, [schedule, rates], epochs=2)
    np.testing.assert_allclose(rates.seen, [0.1] * 6, rtol=1e-6)
    rates.seen.clear()
    schedule = hvd.LearningRateScheduleCallback(0.1, 0.5, start_epoch=1)
    fit(model, [schedule, rates], epochs=4, batch_size=6)
    np.testing.assert_allclose(rates.seen, [0.1, 0.1, 0.05, 0.025], rtol=1e-6)
    passed(f"{name} staircase")


def check_counted_passes(name, optimizers):
    """Checks that passes are counted, by which a schedule sets the learning rate."""
    decay = keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(decay), backward_passes_per_step=2)
    variable = (keras.Variable if is_keras_3 else tf.Variable)(np.zeros(1, np.float32))
    for passes, value in enumerate([0.0, -1.0, -1.0, -1.25], 1):  # 2 * 0.5, 2 * 0.5 ** 3
        optimizer.apply_gradients([(tf.ones(1), variable)])
        assert int(optimizer.iterations) == passes
        np.testing.assert_allclose(variable.numpy(), [value])
    passed(f"{name} counted passes")


def check_skipped_step(name, optimizers, scale_first):
    """Checks that all ranks skip the step in which rank 1 has a gradient that is not finite."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = new_model(keras.layers.Dense(1, use_bias=False))
    keras.mixed_precision.set_global_policy("float32")
    optimizer = optimizers.SGD(1 / 64)
    scaler = getattr(keras.mixed_precision, "LossScaleOptimizer", None)
    scaler = scaler or keras.optimizers.LossScaleOptimizer
    if scale_first:
        optimizer = hvd.DistributedOptimizer(scaler(optimizer, initial_scale=4.0))
    else:
        optimizer = scaler(hvd.DistributedOptimizer(optimizer), initial_scale=4.0)
    model.compile(optimizer, lambda y, predicted: predicted)
    weights = []

    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            weights.append(float(model.get_weights()[0][0, 0]))

    model.set_weights([np.zeros((1, 1), np.float32)])
    x = ONES * (RANK + 1)
    x[2:4] = np.inf if RANK == 1 else 1.0
    fit(model, [hvd.BroadcastGlobalVariablesCallback(0), Steps()], x=x)
    change = -(1 + 2) / 2 / 64
    np.testing.assert_allclose(weights, [change, change, 2 * change], rtol=1e-3)
    scale = optimizer.dynamic_scale if is_keras_3 else optimizer.loss_scale
    assert float(np.asarray(scale)) == 2.0
    passed(f"{name} skipped step {scale_first}")


def check_automatic_scale():
    """Checks that compile, which scales the loss of float16 itself, keeps the reduction."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    keras.utils.set_random_seed(RANK)
    model = new_model(keras.layers.Dense(1))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    keras.mixed_precision.set_global_policy("float32")
    assert type(model.optimizer).__name__.startswith("LossScaleOptimizer")
    fit(model, [hvd.BroadcastGlobalVariablesCallback(0)], x=ONES * RANK)
    gathered = hvd.allgather_object([np.asarray(each) for each in model.get_weights()])
    np.testing.assert_array_equal(gathered[0][0], gathered[1][0])
    passed("automatic scale")


def check_refusals():
    broadcast = hvd.BroadcastGlobalVariablesCallback(0)
    model = new_model(keras.layers.Dense(1))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse", jit_compile=True)
    assert "compiled by XLA" in refused(lambda: fit(model, [broadcast]))
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(decay)), "mse")
    warmup = hvd.LearningRateWarmupCallback(0.1)
    assert "has a LearningRateSchedule" in refused(lambda: fit(model, [warmup]))
    endless = tf.data.Dataset.from_generator(
        lambda: iter([(ONES, ONES)]),
        output_signature=(tf.TensorSpec([6, 1]), tf.TensorSpec([6, 1])),
    )
    refusal = refused(lambda: model.fit(endless, verbose=0, callbacks=[warmup]))
    assert "steps_per_epoch" in refusal
    assert "device is 'GPU:0'" in refused(
        lambda: hvd.BroadcastGlobalVariablesCallback(0, device="GPU:0")
    )
    passed("refusals")


def check_collectives():
    assert float(hvd.allreduce(RANK + 1.0, "a", average=False)) == 3.0
    assert float(hvd.allreduce(RANK + 1.0, name="b")) == 1.5
    assert np.asarray(hvd.allgather([RANK], name="c")).tolist() == [0, 1]
    assert float(hvd.broadcast(float(RANK), 1, name="d")) == 1.0
    part = hvd.reducescatter(np.arange(4.0), name="e", op=hvd.Sum)
    assert np.asarray(part).tolist() == [4.0 * RANK, 4.0 * RANK + 2]
    passed("collectives")


for family, classes in OPTIMIZERS.items():
    check_broadcast_before_training(family, classes)
    check_broadcast_after_first_batch(family, classes)
    check_loaded_on_rank_0(family, classes)
    check_schedules(family, classes)
    check_staircase(family, classes)
    check_counted_passes(family, classes)
    check_local_layers(family, classes)
    for first in (True, False):
        check_skipped_step(family, classes, first)
check_metrics()
check_automatic_scale()
check_refusals()
check_collectives()
