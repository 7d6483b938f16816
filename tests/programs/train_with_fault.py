"""Runs train.py with a fault on one rank at a given point of a step.

The setting "fault" is {"point": ..., "step": step of this process, from 0, "action": ...}. With
"slot" it applies only to the process in that slot of the launcher. "grace_s" is the time from
SIGTERM to the end, and "interrupted_again_s" the time from the second SIGINT to the end.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

import arguments
import numpy as np
import tensorflow as tf
import train

from estimator_ext.session import preemption
from hostopt.gradients.fused_exchange import FusedExchange
from hostopt.gradients.reducer import InlineReducer, Reducer


def stuck_in_user_code() -> None:
    print("user code sleeps now", flush=True)
    time.sleep(1000)


def fail() -> None:
    raise ZeroDivisionError("in the middle of a step")


def kill_node_of_ray() -> None:
    os.kill(int(os.environ["RAY_RAYLET_PID"]), signal.SIGKILL)
    time.sleep(1000)


ACTIONS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "kill-node": kill_node_of_ray,
    "raise": fail,
    "sleep": stuck_in_user_code,
    "fill": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, -1)),
    "open-no-more": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)),
    "say": lambda: print("now", flush=True),
}


def trigger_in_step(fault: dict, calls_per_step: int = 1) -> Callable[[], None]:
    """Returns a function to call at the point of the fault; it acts in the step of the fault."""
    calls = iter(range(1_000_000))

    def trigger() -> None:
        if next(calls) == fault["step"] * calls_per_step:
            ACTIONS[fault["action"]]()

    return trigger


def break_reducers(fault: dict) -> None:
    """Faults before the reduction of a gradient, or after it."""
    before = fault["point"] == "before-reduce"
    for kind, names in ((InlineReducer, ("reduce", "reduce")), (Reducer, ("launch", "wait"))):
        trigger, method = trigger_in_step(fault), names[0 if before else 1]
        original = getattr(kind, method)

        @functools.wraps(original)
        def broken(self: Any, bucket: int, *args: Any, _o=original, _s=trigger) -> Any:
            if before and bucket == 0:
                _s()
            result = _o(self, bucket, *args)
            if not before and bucket == 0:
                _s()
            return result

        setattr(kind, method, broken)
    trigger, run = trigger_in_step(fault), FusedExchange.run

    @functools.wraps(run)
    def broken_run(self: Any, *args: Any) -> Any:
        if before:
            trigger()
        result = run(self, *args)
        if not before:
            trigger()
        return result

    FusedExchange.run = broken_run


def break_updates(fault: dict) -> None:
    """Faults between the updates of the first and the second variable."""
    make = train.make_optimizer
    trigger = trigger_in_step(fault)

    def call() -> np.int32:
        trigger()
        return np.int32(0)

    def make_broken(name: str, learning_rate: float) -> tf.compat.v1.train.Optimizer:
        optimizer = make(name, learning_rate)
        apply, updates = optimizer._resource_apply_dense, []

        def apply_in_turn(gradient: tf.Tensor, variable: tf.Variable) -> tf.Operation:
            with tf.control_dependencies(updates[-1:]):
                after = tf.numpy_function(call, [], tf.int32) if len(updates) == 1 else tf.no_op()
            with tf.control_dependencies([after]):
                updates.append(apply(gradient, variable))
            return updates[-1]

        optimizer._resource_apply_dense = apply_in_turn
        return optimizer

    train.make_optimizer = make_broken


def break_input(fault: dict) -> None:
    """Faults while input_fn computes a batch."""
    make = train.make_input_fn
    trigger = trigger_in_step(fault)

    def make_broken(settings: dict):
        def hold(x: np.ndarray) -> np.ndarray:
            trigger()
            return x

        def broken(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            held = tf.numpy_function(hold, [x], x.dtype)
            held.set_shape(x.shape)
            return held, y

        return lambda input_context: make(settings)(input_context).map(broken)

    train.make_input_fn = make_broken


def break_cleanup(fault: dict) -> None:
    """Faults in a hook, and once more when an exception interrupts it."""
    original = train.train
    trigger = trigger_in_step(fault)

    class Hook(tf.compat.v1.train.SessionRunHook):
        def after_run(self, run_context: Any, run_values: Any) -> None:
            try:
                trigger()
            except KeyboardInterrupt:
                print("cleanup begins", flush=True)
                ACTIONS[fault["action"]]()

    def broken(estimator: Any, input_fn: Any, hooks: list, settings: dict) -> None:
        original(estimator, input_fn, [*hooks, Hook()], settings)

    train.train = broken


BREAK = {
    "before-reduce": break_reducers,
    "after-reduce": break_reducers,
    "between-updates": break_updates,
    "input": break_input,
    "cleanup": break_cleanup,
}

if __name__ == "__main__":
    chosen = arguments.chosen()
    for name in ("GRACE_S", "INTERRUPTED_AGAIN_S"):
        setattr(preemption, name, chosen.pop(name.lower(), getattr(preemption, name)))
    fault = chosen.pop("fault", None)
    if fault is not None and fault.get("slot") in (None, int(os.environ.get("HOSTOPT_SLOT", "0"))):
        BREAK[fault["point"]](fault)
    train.main({**train.SETTINGS, **chosen})
