"""Trains models of some kilobytes, each up to some steps, and keeps their checkpoints.

Arguments: directory, the steps, separated by commas, and the names of cases. What the ranks divide
is logged.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import estimator_ext

estimator_ext.install()
tf.get_logger().setLevel("INFO")
train, keras = tf.compat.v1.train, tf.keras.optimizers.legacy


class DecayedAdam(train.AdamOptimizer):
    """Changes a variable twice in a step."""

    def _resource_apply_dense(self, grad: Any, var: Any) -> Any:
        with tf.control_dependencies([var.assign_sub(0.01 * var, read_value=False)]):
            return super()._resource_apply_dense(grad, var)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: train.GradientDescentOptimizer(0.1),
    "momentum": lambda: train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "adam": lambda: train.AdamOptimizer(0.01),
    "decayed": lambda: DecayedAdam(0.01),
    "rmsprop": lambda: train.RMSPropOptimizer(0.01, momentum=0.9),
    "centered": lambda: train.RMSPropOptimizer(0.01, centered=True),
    "adagrad": lambda: train.AdagradOptimizer(0.1),
    "ftrl": lambda: train.FtrlOptimizer(0.1, l1_regularization_strength=0.001),
    "adadelta": lambda: train.AdadeltaOptimizer(0.5),
    "float16": lambda: train.MomentumOptimizer(0.001, 0.9),  # the epsilon of Adam would be 0
    "bfloat16": lambda: train.MomentumOptimizer(0.001, 0.9),
    "rows_of_ftrl": lambda: train.FtrlOptimizer(0.1, l1_regularization_strength=0.001),
    "rows_of_adagrad": lambda: train.AdagradOptimizer(0.1),
    "rows_of_momentum": lambda: train.MomentumOptimizer(0.1, 0.9),
    "rows_of_rmsprop": lambda: train.RMSPropOptimizer(0.01, momentum=0.9),
    "rows_of_adadelta": lambda: train.AdadeltaOptimizer(0.5),
    "rows_of_keras": lambda: keras.Adagrad(0.1),
    "rows_of_keras_adam": lambda: keras.Adam(0.01),
    "keras_adam": lambda: keras.Adam(0.01, amsgrad=True),
    "keras_adamax": lambda: keras.Adamax(0.01),
    "keras_constraint": lambda: keras.Adam(0.01),
    "keras_rmsprop": lambda: keras.RMSprop(0.01),
}
DTYPES = {"float64": tf.float64, "bfloat16": tf.bfloat16, "float16": tf.float16}
CONFIG = {"accumulate": {"accumulate_steps": 2}}


def clip(value: Any) -> Any:
    """Constrains the values of a variable."""
    return tf.clip_by_value(value, -0.08, 0.08)


def own_updates(pairs: Any, step: Any, case: str, is_chief: bool) -> Any:
    """Returns Adam with decay of the weights, without an optimizer of TensorFlow, and hooks."""
    assignments, hooks = [step.assign_add(1)], []
    rate = 0.01 * tf.math.rsqrt(tf.cast(step, tf.float32) + 1)
    for gradient, variable in pairs:
        name = variable.op.name
        m, v = (
            tf.compat.v1.get_variable(
                f"{name}/{slot}",
                variable.shape,
                trainable=False,
                initializer=tf.zeros_initializer(),
            )
            for slot in ("m", "v")
        )
        new_m = 0.9 * m + 0.1 * gradient
        new_v = 0.999 * v + 0.001 * tf.square(gradient)
        change = new_m / (tf.sqrt(new_v) + 1e-6) + 0.01 * variable
        if case == "own_lamb":
            change *= tf.norm(variable) / (tf.norm(change) + 1e-6)
        if case == "own_clipped":
            change = tf.clip_by_value(change, -0.5, 0.5)
        if case == "own_fetched" and is_chief:
            hooks.append(train.LoggingTensorHook([change.name], 1))
        if case == "own_summary" and is_chief and name == "first":
            tf.compat.v1.summary.histogram("change", change)
        new = variable - rate * change
        if case == "own_previous":  # a slot is the value that the variable had
            old = tf.identity(variable)
            new = old + 0.5 * (old - m) - rate * gradient
            with tf.control_dependencies([new]):
                new_m = tf.identity(old)
        assignments += [variable.assign(new), m.assign(new_m), v.assign(new_v)]
    return tf.group(*assignments), hooks


class Loads(tf.estimator.SessionRunHook):
    """Changes a variable after the third step, by a value or in place."""

    def __init__(self, name: str, in_place: bool) -> None:
        self.variable = next(v for v in tf.compat.v1.trainable_variables() if v.op.name == name)
        with tf.control_dependencies(None):
            self.change = self.variable.assign_sub(self.variable / 2, read_value=False)
        self.in_place = in_place
        self.steps = 0

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.steps += 1
        if self.steps == 3:
            session = run_context.session
            if self.in_place:
                session.run(self.change)
            else:
                self.variable.load(session.run(self.variable) / 2, session)


class ChangesSlice(tf.estimator.SessionRunHook):
    """Fetches rows of a variable with each step, and changes what it got."""

    def __init__(self, variable: Any, rank: int) -> None:
        self.rows = variable[:128]
        self.rank = rank

    def before_run(self, run_context: Any) -> Any:
        return train.SessionRunArgs(self.rows)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if run_values.results.flags.writeable:
            run_values.results[:] = self.rank


class ReadsInThread(tf.estimator.SessionRunHook):
    """Reads a variable all the time, in another thread."""

    def begin(self) -> None:
        variable = next(v for v in tf.compat.v1.trainable_variables() if v.op.name == "first")
        sums = [
            *tf.compat.v1.get_collection("NORM"),
            tf.reduce_sum(tf.abs(tf.reshape(variable, [-1]))),
        ]
        self.sums_and_value = [*sums, variable]
        self.is_over = threading.Event()
        self.sums: list[float] = []

    def after_create_session(self, session: Any, coord: Any) -> None:
        def read() -> None:
            while not self.is_over.is_set():
                *sums, value = session.run(self.sums_and_value)
                self.sums += [*sums, np.abs(value).sum()]

        self.thread = threading.Thread(target=read)
        self.thread.start()

    def end(self, session: Any) -> None:
        self.is_over.set()
        self.thread.join()
        assert min(self.sums) > 0, "a read found no value"


class Writes(tf.estimator.SessionRunHook):
    """Has a variable changed by a branch, which may run at any time."""

    def begin(self) -> None:
        variable = next(v for v in tf.compat.v1.trainable_variables() if v.op.name == "first")
        step = tf.compat.v1.train.get_global_step()
        self.change = tf.cond(
            step > 2, lambda: tf.reduce_sum(variable.assign(variable / 2)), lambda: 0.0
        )

    def before_run(self, run_context: Any) -> Any:
        return train.SessionRunArgs(self.change)


class HasNoSlots(tf.estimator.SessionRunHook):
    """Checks that only a save gives slots to a rank; the last step is saved."""

    def begin(self) -> None:
        names = ("first/Adam", "second/Adam_1")
        slots = [v for v in tf.compat.v1.global_variables() if v.op.name in names]
        self.have = [tf.compat.v1.is_variable_initialized(slot) for slot in slots]

    def before_run(self, run_context: Any) -> None:
        if self.have and run_context.session.run(self.have) != [False, False]:
            step = run_context.session.run(train.get_global_step())
            assert step % 3 == 0, f"the rank has slots before step {step}"


class Prints(tf.estimator.SessionRunHook):
    """Prints each step."""

    def after_run(self, run_context: Any, run_values: Any) -> None:
        print("STEP", run_context.session.run(train.get_global_step()), flush=True)


class UsesSlot(tf.estimator.SessionRunHook):
    """Reads a slot, or runs its initializer."""

    def __init__(self, case: str) -> None:
        self.case = case

    def begin(self) -> None:
        variables = tf.compat.v1.global_variables()
        self.slot = next(v for v in variables if v.op.name == "first/Adam")

    def after_run(self, run_context: Any, run_values: Any) -> None:
        fetches = {
            "read_slot": self.slot,
            "read_by_name": "first/Adam/Read/ReadVariableOp:0",
            "assigned": self.slot.initializer,
        }
        run_context.session.run(fetches[self.case])


class ReadsSlots(tf.estimator.SessionRunHook):
    """Reads slots in each step, at any time, and saves what it has read at the end."""

    def __init__(self, slots: list[Any], path: str) -> None:
        self.slots = slots
        self.path = path
        self.held: list[Any] = []

    def begin(self) -> None:
        self.sums = [tf.reduce_sum(slot) for slot in self.slots]
        self.rows = [tf.gather(slot, [0, 109]) for slot in self.slots]
        self.logged = tf.compat.v1.train.LoggingTensorHook({"slot": self.slots[0]}, 2)
        self.logged.begin()

    def before_run(self, run_context: Any) -> Any:
        self.old = run_context.session.run(self.slots)
        tensors = list(self.logged._current_tensors.values())
        return train.SessionRunArgs([self.slots, self.rows, self.sums, tensors])

    def after_run(self, run_context: Any, run_values: Any) -> None:
        *found, logged = run_values.results
        new, *parts = run_context.session.run([self.slots, self.rows, self.sums])
        for old, value, after in zip(self.old, found[0], new):
            assert not np.array_equal(old, after)
            assert any(np.array_equal(value, each) for each in (old, after))
        assert any(np.array_equal(logged[0], each[0]) for each in (self.old, new))
        for value, rows in zip(new, parts[0]):
            np.testing.assert_array_equal(rows, value[[0, 109]])
        self.held += [(value, value.copy()) for value in [*found[0], *new]]
        self.last = new

    def end(self, session: Any) -> None:
        for value, copy in self.held:
            np.testing.assert_array_equal(value, copy)
        np.savez(self.path, *self.last)


class SetsLimit(tf.estimator.SessionRunHook):
    """Sets the size of the largest file, also in /dev/shm, when the training is built."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def begin(self) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.nbytes, most))


class Holds(tf.estimator.SessionRunHook):
    """Holds the values of all steps, which must stay as they were."""

    def __init__(self) -> None:
        self.variables = tf.compat.v1.trainable_variables()
        self.held: list[Any] = []

    def before_run(self, run_context: Any) -> Any:
        return train.SessionRunArgs(self.variables)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        values = run_values.results + run_context.session.run(self.variables)
        self.held.append((values, [np.array(value) for value in values]))

    def end(self, session: Any) -> None:
        for values, copies in self.held:
            for value, copy in zip(values, copies):
                np.testing.assert_array_equal(value, copy)


class Reads(tf.estimator.SessionRunHook):
    """Reads a variable in each step, at any time; every value is that before or after the step."""

    def begin(self) -> None:
        variable = next(v for v in tf.compat.v1.trainable_variables() if v.op.name == "first")
        self.variable = variable
        step = tf.compat.v1.train.get_global_step()
        self.whole = {
            "fetched": variable,
            "by name": "first/Read/ReadVariableOp:0",
            "read": variable.read_value(),
            "again": variable.read_value(),
            "branch": tf.cond(step >= 0, lambda: tf.identity(variable), lambda: tf.zeros([1])),
            "function": tf.function(lambda: variable + 0.0)(),
        }
        # the update of its own, which ranks that divide it join later
        update = next(
            op
            for op in tf.compat.v1.get_default_graph().get_operations()
            if op.type == "ResourceApplyAdam" and "first" in op.name
        )
        with tf.control_dependencies([update]):
            self.whole["during"] = variable.read_value()
        self.rows = tf.gather(variable, [0, 129])
        self.shape = tf.shape(variable)
        with tf.control_dependencies([step.op, *tf.compat.v1.get_collection("TRAIN_OPS")]):
            self.last = variable.read_value()

    def before_run(self, run_context: Any) -> Any:
        self.old = run_context.session.run(self.variable)
        return train.SessionRunArgs([self.whole, self.rows, self.shape, self.last])

    def after_run(self, run_context: Any, run_values: Any) -> None:
        whole, rows, shape, last = run_values.results
        new, again = run_context.session.run([self.variable, self.whole["again"]])
        assert not np.array_equal(new, self.old)
        np.testing.assert_array_equal(last, new)
        np.testing.assert_array_equal(again, new)
        for name, value in whole.items():
            is_one = np.array_equal(value, self.old) or np.array_equal(value, new)
            assert is_one, f"{name} has another value"
        assert any(np.array_equal(rows, each[[0, 129]]) for each in (self.old, new))
        assert list(shape) == [130, 301]


def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
    case = params["case"]
    dtype = DTYPES.get(case, tf.float32)
    x, y = tf.cast(features, dtype), tf.cast(labels, dtype)
    partitioner = tf.compat.v1.fixed_size_partitioner(2) if case == "partitioned" else None

    def weights(name: str, shape: list[int], seed: int) -> Any:
        initial = tf.compat.v1.keras.initializers.glorot_uniform(seed=seed)
        return tf.compat.v1.get_variable(
            name,
            shape,
            dtype,
            initial,
            partitioner=partitioner if seed == 1 else None,
            constraint=clip if case == "keras_constraint" else None,
        )

    first, second = weights("first", [130, 301], 1), weights("second", [301, 111], 2)
    last = weights("last", [111, 1], 3)
    if case == "embedding" or case.startswith("rows_of"):
        # two tables of one width, which share a group, and one that is smaller
        for seed, rows in ((4, 3001), (7, 2512), (8, 100)):
            table = weights(f"table_{seed}", [rows, 130], seed)
            ids = tf.cast(features[:, :2] * (rows - 1), tf.int64)
            x = x + tf.reduce_sum(tf.nn.embedding_lookup(table, ids), 1)
    hooks: list[Any] = []
    hidden = tf.tanh(tf.tanh(x @ first) @ second)
    loss = tf.reduce_mean((tf.squeeze(hidden @ last, 1) - y) ** 2)
    if case == "empty":
        loss += tf.reduce_sum(weights("empty", [0, 7], 5))
    if case in ("slices", "own_previous", "large", "no_memory", "one_gpu"):
        is_small = case in ("slices", "own_previous")
        wide = weights("wide", [130, 320 if is_small else 1 << 14], 6)  # parts are aligned
        loss += tf.reduce_mean(tf.tanh(x @ wide))
        if case == "slices":
            hooks.append(ChangesSlice(wide, params["is_chief"]))
    name = re.sub("_(slots_read|held|loaded)$", "", case)
    optimizer = OPTIMIZERS.get(name, OPTIMIZERS["adam"])()
    step = train.get_global_step()
    if "keras" in case:
        optimizer.iterations = step
        train_op = tf.group(*optimizer.get_updates(loss, tf.compat.v1.trainable_variables()))
    elif case == "clipped":
        pairs = estimator_ext.reduce_gradients(optimizer.compute_gradients(loss))
        clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 0.1)
        train_op = optimizer.apply_gradients(zip(clipped, [v for _, v in pairs]), step)
    elif case.startswith("own"):
        pairs = estimator_ext.reduce_gradients(optimizer.compute_gradients(loss))
        if case == "own_clipped":
            clipped, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 0.1)
            pairs = [(gradient, v) for gradient, (_, v) in zip(clipped, pairs)]
        train_op, hooks = own_updates(pairs, step, case, params["is_chief"])
    elif case == "decayed_before":  # each update waits for changes of all variables
        pairs = optimizer.compute_gradients(loss)
        decays = [v.assign_sub(0.01 * v, read_value=False) for _, v in pairs]
        with tf.control_dependencies(decays):
            train_op = optimizer.apply_gradients(pairs, step)
    elif case in ("fetched", "summary_of_one"):
        pairs = estimator_ext.reduce_gradients(optimizer.compute_gradients(loss))
        if params["is_chief"] and case == "fetched":
            hooks.append(train.LoggingTensorHook({"gradient": pairs[0][0]}, 1))
        elif params["is_chief"]:
            tf.compat.v1.summary.histogram("gradient", pairs[0][0])
        train_op = optimizer.apply_gradients(pairs, step)
    elif case == "two":
        before = optimizer.minimize(loss, var_list=[first, last])
        with tf.control_dependencies([before]):
            other = train.MomentumOptimizer(0.1, 0.9)
            rows = tf.gather(first, tf.identity(tf.cast(x[:, 0] * 129, tf.int64)))
            loss_after = tf.reduce_mean(tf.abs((tf.tanh(x @ first) + rows) @ second))
            train_op = other.minimize(loss_after, step, var_list=[second])
    else:
        train_op = optimizer.minimize(loss, step)
    if case == "average":
        with tf.control_dependencies([train_op]):
            train_op = train.ExponentialMovingAverage(0.9).apply([first, second])
    if case == "slots":
        tf.compat.v1.summary.histogram("slot", optimizer.get_slot(second, "m"))
        hooks.append(
            train.SummarySaverHook(
                1, output_dir=params["events"], summary_op=tf.compat.v1.summary.merge_all()
            )
        )
    if case.endswith("_slots_read"):
        trained = [v for v in tf.compat.v1.trainable_variables() if v.op.name != "table_8"]
        names = optimizer.get_slot_names()
        slots = [optimizer.get_slot(v, name) for v in trained for name in names]
        hooks.append(ReadsSlots(slots, params["slots"]))
    if case == "no_memory":
        limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, most))
        hooks.append(SetsLimit(limit))
    if case.endswith(("loaded", "in_place")):
        name = "table_4" if case.startswith("rows_of") else "first"
        hooks.append(Loads(name, case == "in_place"))
    if case.endswith("held"):
        hooks.append(Holds())
    if case == "reads":
        tf.compat.v1.add_to_collection("TRAIN_OPS", train_op)
        hooks.append(Reads())
    if case == "thread":
        tf.compat.v1.add_to_collection("NORM", tf.reduce_sum(tf.abs(first)))
        hooks.append(ReadsInThread())
    if case == "writes":
        hooks.append(Writes())
    if case == "steps":
        hooks.append(Prints())
    if case in ("assigned", "read_slot", "read_by_name"):
        hooks.append(UsesSlot(case))
    if case == "no_slots" and params["divides"]:
        hooks.append(HasNoSlots())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=hooks)


def input_fn(input_context: Any) -> Any:
    random = np.random.RandomState(0)
    x = random.rand(16 * 12, 130).astype(np.float32)
    y = (x.sum(1) / 10).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, y))
    data = data.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return data.repeat().batch(8, drop_remainder=True)


def mapped_bytes() -> int:
    """Returns the size of the memory that this process shares with other ranks."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if "/dev/shm/hostopt-" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


def main(directory: str, steps: str, *cases: str) -> None:
    for case in cases:
        options = {"nonfinite": "skip"} if case == "skipped" else {}
        device = "/device:CPU:1"
        if case == "one_gpu" and json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
            device = "/device:GPU:0"  # which is not there, so that TensorFlow uses the CPU
        strategy = estimator_ext.HostOffloadStrategy(accelerator=device, **options)
        config = estimator_ext.RunConfig(
            train_distribute=strategy, save_checkpoints_steps=3, **CONFIG.get(case, {})
        )
        params = {
            "case": case,
            "divides": strategy.options.shard_optimizer,
            "is_chief": strategy.cluster.is_chief,
            "events": f"{directory}/events-{case}-{strategy.cluster.rank}",
            "slots": f"{directory}/{case}-{strategy.cluster.rank}.npz",
        }
        estimator = estimator_ext.Estimator(model_fn, f"{directory}/{case}", config, params)
        for step in steps.split(","):
            print(f"CASE {case} to {step}", flush=True)
            estimator.train(input_fn, max_steps=int(step))
            print("MAPPED", mapped_bytes(), flush=True)
        strategy.close()


main(*sys.argv[1:])
