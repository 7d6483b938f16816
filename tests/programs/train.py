"""Trains a small model with the given settings, and writes the values that tests compare."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import arguments
import numpy as np
import tensorflow as tf
from foreign_optimizers import AdamWeightDecay
from session_hooks import AfterStep, BeforeStep, Dump, Trace, stop_here

import estimator_ext
import hostopt
from estimator_ext.estimator import training_graph
from estimator_ext.variables.sync_on_read import assign

estimator_ext.install()

SETTINGS = {
    "model_dir": "",  # checkpoints, with a subdirectory for each optimizer
    "dump_dir": "",  # final variables of each rank
    "optimizers": ["sgd"],
    "steps": 20,
    "dtype": "float64",
    "model": "mlp",  # or "conv", "embedding", "averages", "batch_norm", "variables"
    "hidden": 8,
    "spec": "host_call",  # or "minimize", or "two_minimize", one for each layer
    "variables_on_host": True,
    "bucket_mb": 25.0,
    "batches": 0,  # batches of this rank; 0 for infinite
    "shuffled": False,  # examples in random order, infinitely
    "as_tensors": False,  # input_fn returns tensors, without a signal at their end
    "learning_rate": 0.01,
    "api": "train",  # or "ours", "stock": train_and_evaluate
    "trace": False,
    "own_memory": False,  # the accelerator stands for one with memory of its own
    "raise_in": "",  # "model_fn", "host_call" or "input_fn"; "... op": in a step; or "hook"
    "raise_kind": "ZeroDivisionError",
    "raise_at": 1,  # number of the call that raises
    "stop_at": 0,  # step after which this rank blocks, to be killed
    "evaluated_at": 0,  # step after which the chief waits for an evaluator's result
    "max_steps": True,  # False: steps, counted from the start of this training
    "checkpoint_steps": 5,
    "collective_timeout_s": 60.0,
    "summary_steps": 100,
    "loss_scale": False,  # the gradient of the third step overflows on rank 1
    "clip": 0.0,  # norm to which the reduced gradients are clipped, each by itself if minimized
    "rotated": False,  # each rank passes its gradients in a different order
    "accumulate_steps": 1,
    "sparse_as_dense": False,
    "lengths": [],  # examples of each batch, by rank; a single rank takes all
    "merge": 1,  # number of such batches that are merged into one
    "repeated": False,  # such batches again and again
    "uneven_data": "join",
    "early_stopping": False,  # with TensorFlow's hook, which stops after 6 steps
    "asking": None,  # rank whose hook requests a stop after 5 steps
    "timeline": None,
    "communication": "auto",
    "nonfinite": "error",
    "nan_at": [],  # rank and step at which the gradients of all but the last layer are NaN
    "nan_loss": False,  # True: the loss is NaN as well, and all gradients
    "leave_out": [],  # batches that are skipped
    "desync_check_steps": 1000,
    "change_at": 0,  # step in which this rank changes its first kernel
    "catch": False,  # print the error that ends the training, and continue
}
GLOBAL_BATCH, BATCHES, VOCABULARY = 12, 7, 20


class DumpWithLosses(Dump):
    """Writes the loss of each step, too."""

    def begin(self) -> None:
        super().begin()
        self._loss = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.LOSSES)[-1]
        self._losses: list[float] = []

    def before_run(self, run_context: object) -> tf.estimator.SessionRunArgs:
        return tf.estimator.SessionRunArgs(self._loss)

    def after_run(self, run_context: object, run_values: object) -> None:
        self._losses.append(float(run_values.results))

    def end(self, session: tf.compat.v1.Session) -> None:
        values = session.run(self._variables)
        np.savez(self._path, losses=np.array(self._losses), **values)


def await_evaluation(eval_dir: Path) -> None:
    """Waits until an evaluator has reported an accuracy."""
    deadline_s = time.monotonic() + 60
    while not has_accuracy(eval_dir):
        assert time.monotonic() < deadline_s, "no evaluation during training"
        threading.Event().wait(0.2)
    print("evaluated during training", flush=True)


def has_accuracy(eval_dir: Path) -> bool:
    with contextlib.suppress(tf.errors.DataLossError):  # an incomplete record
        for path in eval_dir.glob("events.*"):
            for event in tf.compat.v1.train.summary_iterator(str(path)):
                if any(value.tag == "acc" for value in event.summary.value):
                    return True
    return False


def change_kernel(run_context: object) -> None:
    """Changes a variable on this rank only."""
    kernel = tf.compat.v1.trainable_variables()[0]
    value = run_context.session.run(kernel)
    assign(run_context.session, [kernel], [value + 1])


class RaiseInHook(tf.estimator.SessionRunHook):
    """Raises before a step, or after it."""

    def __init__(self, settings: dict) -> None:
        self._settings = settings

    def before_run(self, run_context: object) -> None:
        maybe_raise(self._settings, "hook")

    def after_run(self, run_context: object, run_values: object) -> None:
        maybe_raise(self._settings, "hook after a step")


def maybe_raise(settings: dict, where: str) -> None:
    if settings["raise_in"] == where:
        settings["raise_at"] -= 1
        if settings["raise_at"] == 0:
            raise ERRORS[settings["raise_kind"]](f"raised in {where}")


ERRORS = {
    "ZeroDivisionError": ZeroDivisionError,
    "StopIteration": StopIteration,
    "UnavailableError": lambda text: tf.errors.UnavailableError(None, None, text),
    "sys.exit(0)": lambda text: SystemExit(0),
}


def raising(tensor: tf.Tensor, settings: dict, where: str) -> tf.Tensor:
    """Passes a tensor through a Python function, which may raise."""

    def call(array: np.ndarray) -> np.ndarray:
        maybe_raise(settings, where)
        return array

    if settings["raise_in"] != where:
        return tensor
    result = tf.numpy_function(call, [tensor], tensor.dtype)
    result.set_shape(tensor.shape)
    return result


def arrays(dtype: str, model: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns BATCHES global batches of features and labels, the same in every process."""
    random = np.random.RandomState(0)
    shape = (28, 28, 1) if model == "conv" else (5,)
    if model == "embedding":
        x = random.randint(0, VOCABULARY, (BATCHES, GLOBAL_BATCH, 3))
        return x, (x.sum(-1) % 2).astype(np.int64)
    x = random.standard_normal((BATCHES, GLOBAL_BATCH, *shape)).astype(dtype)
    return x, (x.reshape(BATCHES, GLOBAL_BATCH, -1).sum(-1) > 0).astype(np.int64)


def make_input_fn(settings: dict):
    def broken(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return raising(x, settings, "input_fn"), y

    def input_fn(input_context: tf.distribute.InputContext):
        if settings["lengths"]:
            dataset = uneven_dataset(settings, input_context)
            return dataset.repeat() if settings["repeated"] else dataset
        x, y = arrays(settings["dtype"], settings["model"])
        if settings["raise_in"] == "input_fn":  # while training, not while the graph is built
            return tf.data.Dataset.from_tensors((x[0], y[0])).repeat().map(broken)
        ranks = input_context.num_input_pipelines
        assert input_context.num_replicas_in_sync == ranks
        rows = GLOBAL_BATCH // ranks
        local = slice(input_context.input_pipeline_id * rows, None)
        x, y = x[:, local][:, :rows], y[:, local][:, :rows]
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat()
        if settings["shuffled"]:
            dataset = shuffled_dataset(settings, input_context)
        for number in settings["leave_out"]:
            dataset = dataset.take(number).concatenate(dataset.skip(number + 1))
        dataset = dataset.take(settings["batches"]) if settings["batches"] else dataset
        if settings["as_tensors"]:
            return tf.compat.v1.data.make_one_shot_iterator(dataset).get_next()
        return dataset

    return input_fn


def shuffled_dataset(settings: dict, context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Returns batches of this rank's examples, reshuffled in each epoch."""
    x, y = (each.reshape(-1, *each.shape[2:]) for each in arrays(settings["dtype"], "mlp"))
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    dataset = dataset.shuffle(2 * GLOBAL_BATCH, seed=3).repeat()
    dataset = dataset.map(lambda x, y: (2 * x, y), num_parallel_calls=2)
    return dataset.batch(GLOBAL_BATCH // context.num_input_pipelines).prefetch(2)


def uneven_dataset(settings: dict, context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Returns batches of the given lengths; a single rank reads the examples of all ranks."""
    lengths, rank, merge = settings["lengths"], context.input_pipeline_id, settings["merge"]
    local = range(len(lengths)) if context.num_input_pipelines == 1 else [rank]

    def batches():
        for begin in range(0, max(len(lengths[r]) for r in local), merge):
            if begin in settings["leave_out"]:
                continue
            parts = [
                np.random.RandomState([step, r]).standard_normal((lengths[r][step], 5))
                for step in range(begin, begin + merge)
                for r in local
                if step < len(lengths[r])
            ]
            x = np.concatenate(parts).astype(settings["dtype"])
            yield x, (x.sum(-1) > 0).astype(np.int64)

    return tf.data.Dataset.from_generator(
        batches,
        output_signature=(
            tf.TensorSpec([None, 5], settings["dtype"]),
            tf.TensorSpec([None], tf.int64),
        ),
    )


def make_optimizer(name: str, learning_rate: float) -> tf.compat.v1.train.Optimizer:
    train = tf.compat.v1.train
    return {
        "sgd": lambda: train.GradientDescentOptimizer(learning_rate),
        "momentum": lambda: train.MomentumOptimizer(learning_rate, 0.9),
        "adam": lambda: train.AdamOptimizer(learning_rate),
        "adam by hand": lambda: AdamWeightDecay(learning_rate),
    }[name]()


def averages(features: tf.Tensor) -> list[tf.Tensor]:
    """Returns updates of a per-rank average and count; also creates an unused variable."""
    on_read = {"trainable": False, "synchronization": tf.VariableSynchronization.ON_READ}
    mean, total = tf.VariableAggregation.MEAN, tf.VariableAggregation.SUM
    get = tf.compat.v1.get_variable
    zeros = tf.compat.v1.zeros_initializer()
    moving = get("moving", [5], features.dtype, zeros, aggregation=mean, **on_read)
    observed = get("seen", [], tf.int64, zeros, aggregation=total, **on_read)
    get("unused", [3], features.dtype, zeros)
    now = tf.reduce_mean(features, 0)
    rows = tf.shape(features, tf.int64)[0]
    return [moving.assign_add((now - moving) * 0.1), observed.assign_add(rows)]


def variables_of_all_kinds(x: tf.Tensor) -> tf.Tensor:
    """Applies partitioned, shared, integer and local variables to the features."""
    v1 = tf.compat.v1
    with v1.variable_scope("kinds", reuse=v1.AUTO_REUSE):
        split = v1.fixed_size_partitioner(2)
        parts = v1.get_variable("parts", [4], x.dtype, v1.zeros_initializer(), partitioner=split)
        shared = [v1.get_variable("shared", [1], x.dtype, v1.ones_initializer()) for _ in range(2)]
        runs = v1.get_variable("runs", [], tf.int64, v1.zeros_initializer(), trainable=False)
        local = v1.get_local_variable("local", [], x.dtype, v1.ones_initializer())
    scale = tf.concat([tf.convert_to_tensor(parts), shared[0] * shared[1]], 0)
    with tf.control_dependencies([runs.assign_add(1), local.assign_add(1)]):
        return x * (1 + scale)


def poisoned(tensor: tf.Tensor, settings: dict) -> tf.Tensor:
    """Returns the same tensor, with a NaN gradient or value on one rank in one step."""
    rank, step = settings["nan_at"]
    if tf.distribute.get_strategy().extended.input_context().input_pipeline_id != rank:
        return tensor
    now = tf.equal(tf.compat.v1.train.get_global_step(), step)
    factor = tf.where(now, tf.constant(np.nan, tensor.dtype), 1.0)
    if settings["nan_loss"]:
        return tensor * factor

    @tf.custom_gradient
    def same(values: tf.Tensor):
        return tf.identity(values), lambda up: up * factor

    return same(tensor)


def make_model_fn(settings: dict, optimizer_name: str):
    def model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str):
        maybe_raise(settings, "model_fn")
        layers = tf.keras.layers
        dtype = settings["dtype"]
        x = features
        if settings["model"] == "conv":
            x = layers.Conv2D(32, 3, activation="relu", dtype=dtype)(x)
            x = layers.Flatten()(layers.MaxPooling2D()(x))
        if settings["model"] == "embedding":
            start = tf.random.stateless_normal([VOCABULARY, 4], [1, 2], dtype=dtype)
            table = tf.compat.v1.get_variable("table", initializer=lambda: start)
            x = tf.reshape(tf.nn.embedding_lookup(table, x), [-1, 12])
        if settings["model"] == "batch_norm":
            training = mode == tf.estimator.ModeKeys.TRAIN
            x = tf.compat.v1.layers.batch_normalization(x, momentum=0.875, training=training)
        if settings["model"] == "variables":
            x = variables_of_all_kinds(x)
        x = layers.Dense(settings["hidden"], activation="relu", dtype=dtype)(x)
        if settings["nan_at"] and mode == tf.estimator.ModeKeys.TRAIN:
            x = poisoned(x, settings)
        logits = layers.Dense(2, dtype=dtype)(x)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        loss = tf.reduce_sum(losses) / tf.cast(tf.size(labels), losses.dtype)
        called = raising(loss, settings, "model_fn op")
        if settings["raise_in"] == "branch":
            called = tf.cond(loss > 0, lambda: raising(loss, settings, "branch"), lambda: loss)
        with tf.control_dependencies([called]):
            loss = tf.identity(loss)
        if mode == tf.estimator.ModeKeys.EVAL:
            accuracy = tf.compat.v1.metrics.accuracy(labels, tf.argmax(logits, 1))
            return estimator_ext.EstimatorSpec(mode, loss=loss, eval_metric_ops={"acc": accuracy})
        updates = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
        if settings["model"] == "averages":
            updates = averages(features)
        optimizer = make_optimizer(optimizer_name, settings["learning_rate"])
        if settings["loss_scale"]:
            optimizer = estimator_ext.LossScaleOptimizer(optimizer, scale=2.0**10, growth_steps=4)
            step = tf.compat.v1.train.get_global_step()
            overflows = tf.logical_and(
                tf.equal(step, 2),
                tf.distribute.get_strategy().extended.input_context().input_pipeline_id
                == tf.distribute.get_strategy().num_replicas_in_sync - 1,
            )
            loss *= tf.where(overflows, tf.constant(np.inf, loss.dtype), 1.0)
        if settings["spec"] == "minimize":
            step = tf.compat.v1.train.get_global_step()
            pairs = optimizer.compute_gradients(loss)
            if settings["clip"]:
                pairs = [
                    (tf.clip_by_norm(gradient, settings["clip"]), v)
                    for gradient, v in estimator_ext.reduce_gradients(pairs)
                ]
            train_op = optimizer.apply_gradients(pairs, global_step=step)
            if isinstance(optimizer, AdamWeightDecay):  # which leaves the step to the program
                train_op = tf.group(train_op, step.assign_add(1))
            return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
        variables = tf.compat.v1.trainable_variables()
        if settings["spec"] == "two_minimize":
            other = make_optimizer(optimizer_name, settings["learning_rate"])
            step = tf.compat.v1.train.get_global_step()
            both = [
                optimizer.minimize(loss, var_list=variables[2:], global_step=step),
                other.minimize(loss, var_list=variables[:2]),
            ]
            return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=tf.group(*both))

        def host_model_fn(*gradients: tf.Tensor) -> tf.Operation:
            maybe_raise(settings, "host_call")
            pairs = list(zip(gradients, variables))
            pairs[0] = raising(pairs[0][0], settings, "host_call op"), pairs[0][1]
            if settings["rotated"]:
                rank = tf.distribute.get_strategy().extended.input_context().input_pipeline_id
                pairs = pairs[rank:] + pairs[:rank]
            if settings["clip"]:
                pairs = estimator_ext.reduce_gradients(pairs)
                clipped, _ = tf.clip_by_global_norm([g for g, _ in pairs], settings["clip"])
                pairs = [(gradient, v) for gradient, (_, v) in zip(clipped, pairs)]
            return optimizer.apply_gradients(pairs)

        gradients = [g for g, _ in optimizer.compute_gradients(loss, var_list=variables)]
        with tf.control_dependencies(updates):
            train_op = tf.identity(loss)
        return estimator_ext.EstimatorSpec(
            mode, loss=loss, train_op=train_op, host_call=(host_model_fn, gradients)
        )

    return model_fn


def main(settings: dict) -> None:
    training_graph.is_gpu = lambda device: settings["own_memory"]
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)
    strategy = estimator_ext.HostOffloadStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver(),
        variables_on_host=settings["variables_on_host"],
        accelerator="/device:CPU:1",  # stands for a GPU
        bucket_mb=settings["bucket_mb"],
        sparse_as_dense=settings["sparse_as_dense"],
        collective_timeout_s=settings["collective_timeout_s"],
        communication=settings["communication"],
        nonfinite=settings["nonfinite"],
        desync_check_steps=settings["desync_check_steps"],
    )
    with contextlib.closing(strategy):
        train_all(strategy, settings)


def train_all(strategy, settings: dict) -> None:
    for name in settings["optimizers"]:
        # seeds of Keras layers, which differ on rank 1: the broadcast must replace its values
        tf.keras.utils.set_random_seed(1 if strategy.cluster.is_chief else 2)
        fields = {
            "train_distribute": strategy,
            "session_config": tf.compat.v1.ConfigProto(allow_soft_placement=False),
            "save_checkpoints_steps": settings["checkpoint_steps"],
            "save_summary_steps": settings["summary_steps"],
        }
        config = estimator_ext.RunConfig(
            timeline=settings["timeline"],
            accumulate_steps=settings["accumulate_steps"],
            uneven_data=settings["uneven_data"],
            **fields,
        )
        estimator = estimator_ext.Estimator(
            make_model_fn(settings, name), str(Path(settings["model_dir"]) / name), config
        )
        hooks = []
        if settings["dump_dir"]:
            dump = Path(settings["dump_dir"])
            hooks.append(DumpWithLosses(dump / f"{name}-{strategy.cluster.rank}.npz"))
            if settings["trace"]:
                hooks.append(Trace(str(dump / f"trace-{strategy.cluster.rank}.json")))
        if settings["early_stopping"]:
            observed = iter([False, False, True])
            hooks.append(
                tf.estimator.experimental.make_early_stopping_hook(
                    estimator,
                    lambda observed=observed: next(observed),
                    run_every_secs=None,
                    run_every_steps=3,
                )
            )
        if settings["asking"] is not None and settings["asking"] == strategy.cluster.rank:
            hooks.append(AfterStep(5, lambda context: context.request_stop()))
        if settings["raise_in"].startswith("hook"):
            hooks.append(RaiseInHook(settings))
        if settings["change_at"]:
            hooks.append(BeforeStep(settings["change_at"], change_kernel))
        if settings["stop_at"]:
            hooks.append(BeforeStep(settings["stop_at"], stop_here))
        if settings["evaluated_at"] and strategy.cluster.is_chief:
            wait = functools.partial(await_evaluation, Path(estimator.eval_dir()))
            hooks.append(BeforeStep(settings["evaluated_at"] + 1, lambda _, wait=wait: wait()))
        train(estimator, make_input_fn(settings), hooks, settings)


def train(estimator, input_fn, hooks, settings: dict) -> None:
    steps = settings["steps"]
    if settings["api"] == "train":
        key = "max_steps" if settings["max_steps"] else "steps"
        estimator.train(input_fn, hooks=hooks, **{key: steps})
        return
    api = estimator_ext if settings["api"] == "ours" else tf.estimator
    result = api.train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(input_fn, max_steps=steps, hooks=hooks),
        tf.estimator.EvalSpec(input_fn, steps=3, start_delay_secs=0, throttle_secs=1),
    )
    print("RESULT", json.dumps(result, default=lambda number: number.item()), flush=True)


def report(training: Callable[[], None]) -> None:
    """Runs a training, and prints the error that ends it."""
    caught = None
    try:
        training()
    except Exception as error:
        code = error.exit_code if isinstance(error, hostopt.HostOptError) else 1
        caught = {"code": code, "text": traceback.format_exc(), "message": str(error)}
    print("CAUGHT", json.dumps(caught), flush=True)


if __name__ == "__main__":
    chosen = arguments.chosen()
    task = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]
    index = os.environ.get("HOSTOPT_SLOT", str(task["index"]))  # `hostopt run` has a chief, too
    for run in chosen.pop("runs", [{}]):  # one after the other, each with its settings
        settings = {
            **chosen,
            **run,
            **run.get("rank_settings", {}).get(index, {}),
        }
        settings.pop("rank_settings", None)
        assert not set(settings) - set(SETTINGS), settings
        if settings.get("catch"):
            report(lambda s=settings: main({**SETTINGS, **s}))
        else:
            main({**SETTINGS, **settings})
