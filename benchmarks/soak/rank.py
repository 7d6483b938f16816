"""One process of the soak: trains or evaluates, reports events, and injects faults."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import tensorflow as tf

import estimator_ext
from benchmarks.soak import notes
from hostopt.transport.frame import FrameWriter
from hostopt.transport.grpc import ring as grpc_ring

SEED, EXAMPLES, PIXELS, CLASSES, HIDDEN, BATCH = 7, 1000, 100, 10, 256, 32
CHECKPOINT_STEPS = 50
# Short times, so that a recovery takes seconds; the defaults suit slow networks.
PING_S, COLLECTIVE_TIMEOUT_S, RENDEZVOUS_TIMEOUT_S = 3.0, 30.0, 60.0
EVALUATION_STEPS, THROTTLE_S = 4, 10
_FOREVER_S = 3600.0
_ESTABLISHED = "01"  # the state of a connection in /proc/net/tcp
_TEXT_CHARACTERS = 2000


# --- the training -------------------------------------------------------------------------------


def dense(inputs: Any, units: int, name: str) -> Any:
    with tf.compat.v1.variable_scope(name):
        kernel = tf.compat.v1.get_variable("kernel", [inputs.shape[1], units])
        bias = tf.compat.v1.get_variable(
            "bias", [units], initializer=tf.compat.v1.zeros_initializer()
        )
    return inputs @ kernel + bias


def model_fn(features: Any, labels: Any, mode: str) -> Any:
    hidden = tf.nn.relu(dense(features, HIDDEN, "hidden"))
    logits = dense(hidden, CLASSES, "logits")
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    loss = tf.reduce_sum(losses) / BATCH
    if mode == tf.estimator.ModeKeys.EVAL:
        return estimator_ext.EstimatorSpec(mode, loss=loss)
    optimizer = tf.compat.v1.train.MomentumOptimizer(0.01, 0.9)
    variables = tf.compat.v1.trainable_variables()

    def host_model_fn(*gradients: Any) -> Any:
        return optimizer.apply_gradients(zip(gradients, variables))

    gradients = [g for g, _ in optimizer.compute_gradients(loss, var_list=variables)]
    return estimator_ext.EstimatorSpec(
        mode, loss=loss, train_op=tf.identity(loss), host_call=(host_model_fn, gradients)
    )


def input_fn(input_context: tf.distribute.InputContext) -> Any:
    """Returns the data: sharded, reshuffled in each epoch by index, repeated."""
    numbers = tf.data.Dataset.range(EXAMPLES)
    numbers = numbers.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return batches_of(numbers.shuffle(EXAMPLES, SEED, reshuffle_each_iteration=True).repeat())


def batches_of(numbers: tf.data.Dataset) -> tf.data.Dataset:
    random = np.random.RandomState(SEED)
    x = tf.constant(random.rand(EXAMPLES, PIXELS).astype(np.float32))
    y = tf.constant(random.randint(0, CLASSES, EXAMPLES))
    batches = numbers.batch(BATCH, drop_remainder=True)
    return batches.map(lambda chosen: (tf.gather(x, chosen), tf.gather(y, chosen)))


class Progress(tf.compat.v1.train.SessionRunHook):
    """Reports every step of the chief.

    Args:
      events: receives the events.
      pause_s: pause after each step, so that the run without faults can make as many steps.
    """

    def __init__(self, events: notes.Notes, pause_s: float) -> None:
        self._events = events
        self._pause_s = pause_s

    def begin(self) -> None:
        self._global_step = tf.compat.v1.train.get_global_step()

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._events.add("step", step=int(run_context.session.run(self._global_step)))
        time.sleep(self._pause_s)


class Saved(tf.compat.v1.train.CheckpointSaverListener):
    """Reports every checkpoint of the chief."""

    def __init__(self, events: notes.Notes) -> None:
        self._events = events

    def after_save(self, session: Any, global_step_value: int) -> None:
        self._events.add("saved", step=int(global_step_value))


# --- faults inside the process ------------------------------------------------------------------


class Faults(tf.compat.v1.train.SessionRunHook):
    """Injects the faults that the soak requests from this process: immediately or after a step.

    Args:
      events: receives the event when a fault happens.
    """

    def __init__(self, events: notes.Notes) -> None:
        self._events = events
        self._corrupts = threading.Event()
        self._after_step: Callable[[], None] | None = None
        self._corrupt_frames()
        notes.listen(self._inject)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        do, self._after_step = self._after_step, None
        if do is not None:
            do()

    def _inject(self, fault: str) -> None:
        if fault == "corrupt":
            self._corrupts.set()
        elif fault == "close":
            self._events.add("fault")
            close_connections()
        elif fault == "os-exit":
            self._events.add("fault")
            os._exit(0)
        else:
            do = {
                "sys-exit": sys.exit,
                "raise": fail,
                "hang": lambda: time.sleep(_FOREVER_S),
                "kill-with-child": kill_with_child,
            }[fault]

            def report_and_do() -> None:
                self._events.add("fault")
                do()

            self._after_step = report_and_do

    def _corrupt_frames(self) -> None:
        write_header = FrameWriter.header

        def header(writer: FrameWriter, tag: Any, payload: Any, is_last: bool = False) -> bytes:
            result = write_header(writer, tag, payload, is_last)
            if self._corrupts.is_set() and len(payload):
                self._corrupts.clear()
                self._events.add("fault")
                middle = len(result) // 2
                result = result[:middle] + bytes([result[middle] ^ 16]) + result[middle + 1 :]
            return result

        FrameWriter.header = header  # type: ignore[method-assign]


def fail() -> None:
    raise ValueError("a fault of the program, requested by the soak")


def kill_with_child() -> None:
    """Kills this process while a child that has inherited its descriptors keeps running."""
    if os.fork() == 0:
        time.sleep(_FOREVER_S)
    os.kill(os.getpid(), signal.SIGKILL)


def close_connections() -> None:
    """Shuts down all TCP connections of this process."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _ESTABLISHED:
                inodes.add(fields[9])
    for fd in os.listdir("/proc/self/fd"):
        try:
            inode = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{fd}"))
            if inode and inode[1] in inodes:
                with socket.socket(fileno=os.dup(int(fd))) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # closed in the meantime
            continue


# --- the process --------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--max-steps", type=int, help="default: until a signal arrives")
    parser.add_argument("--pause-s", type=float, default=0.0, help="after each step")
    args = parser.parse_args()
    grpc_ring.DEFAULT = replace(grpc_ring.DEFAULT, keepalive_s=PING_S, ping_timeout_s=PING_S)
    estimator_ext.install()
    strategy = estimator_ext.HostOffloadStrategy(
        communication="grpc+tcp",
        checksum=True,  # explicitly, because the default is off on loopback addresses
        collective_timeout_s=COLLECTIVE_TIMEOUT_S,
        rendezvous_timeout_s=RENDEZVOUS_TIMEOUT_S,
    )
    cluster = strategy.cluster
    events = notes.Notes(cluster.task.name)
    hooks: list[Any] = []
    if cluster.rank is not None:
        hooks.append(Faults(events))
    if cluster.is_chief:
        hooks.append(Progress(events, args.pause_s))
    events.add("start", address=cluster.task.address)
    config = estimator_ext.RunConfig(
        train_distribute=strategy,
        tf_random_seed=SEED,
        save_checkpoints_steps=CHECKPOINT_STEPS,
        save_summary_steps=None,
        log_step_count_steps=None,
    )
    estimator = estimator_ext.Estimator(model_fn, args.model_dir, config)
    listeners = [Saved(events)] if cluster.is_chief else []
    with errors_reported(events):
        estimator_ext.train_and_evaluate(
            estimator,
            tf.estimator.TrainSpec(input_fn, args.max_steps, hooks, listeners),
            tf.estimator.EvalSpec(
                lambda: batches_of(tf.data.Dataset.range(EXAMPLES)),
                steps=EVALUATION_STEPS,
                start_delay_secs=0,
                throttle_secs=THROTTLE_S,
            ),
        )


@contextlib.contextmanager
def errors_reported(events: notes.Notes) -> Iterator[None]:
    """Reports the error that ends this process to the soak."""
    try:
        yield
    except Exception as error:
        events.add("error", error=type(error).__name__, text=str(error)[:_TEXT_CHARACTERS])
        raise


if __name__ == "__main__":
    main()
