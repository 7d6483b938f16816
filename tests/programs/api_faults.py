"""Makes calls of hostopt.tensorflow that fail on rank 1 in a given way.

Usage: api_faults.py FAULT MODE. The error of each rank is printed, then raised.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
import hostopt.tensorflow as hvd

FAULT, MODE = sys.argv[1:]
hvd.init()
RANK = hvd.rank()


def die() -> Any:
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return hvd.allreduce(tf.ones([2]), name="x")


def leave() -> Any:
    if RANK == 1:
        sys.exit(0)
    return hvd.allreduce(tf.ones([2]), name="x")


def omit() -> Any:
    if RANK == 1:
        signal.pause()  # until the test has seen the warning
    return hvd.allreduce(tf.ones([2]), name="x")


def refused_gradients() -> Any:
    x = tf.ones([2], [tf.float32, tf.complex64][RANK])
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.math.real(tf.reduce_sum(x))
    return hvd.DistributedGradientTape(tape, name="x").gradient(loss, x)


FAULTS: dict[str, Callable[[], Any]] = {
    "op": lambda: hvd.allreduce(tf.ones([2]), op=[hvd.Sum, hvd.Max][RANK], name="x"),
    "dtype": lambda: hvd.allreduce(tf.ones([2], [tf.float32, tf.float64][RANK]), name="x"),
    "shape": lambda: hvd.allreduce(tf.ones([2 + RANK]), name="x"),
    "root_rank": lambda: hvd.broadcast(tf.ones([2]), RANK, name="x"),
    "gradients": lambda: hvd.DistributedOptimizer(
        tf.compat.v1.train.GradientDescentOptimizer(1.0)
    ).compute_gradients(lambda: tf.reduce_sum(VARIABLE), [VARIABLE]),
    "op of gradients": lambda: hvd.DistributedOptimizer(
        tf.compat.v1.train.GradientDescentOptimizer(1.0), op=[hvd.Average, hvd.Sum][RANK]
    ).compute_gradients(lambda: tf.reduce_sum(SAME), [SAME]),
    "names": lambda: hvd.allreduce(tf.ones([2]), name=f"x of {RANK}"),
    "refused": lambda: hvd.allreduce(tf.ones([2]), op=[hvd.Sum, hvd.Adasum][RANK], name="x"),
    "refused gradients": refused_gradients,
    "variables": lambda: hvd.broadcast_variables([VARIABLE, VARIABLE]),
    "die": die,
    "leave": leave,
    "omit": omit,
}
VARIABLE = tf.Variable(np.ones([2 + RANK, 3], np.float32), name="weights")
SAME = tf.Variable([1.0], name="weights")


def run() -> None:
    if MODE == "eager":
        FAULTS[FAULT]()
    elif MODE == "function":
        tf.function(FAULTS[FAULT], autograph=False)()
    else:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            session.run(FAULTS[FAULT]())


try:
    run()
except (hostopt.HostOptError, tf.errors.OpError) as error:
    print(f"RAISED {type(error).__name__}: {error}", flush=True)
    for kind in (hostopt.CollectiveMismatchError, tf.errors.FailedPreconditionError):
        print(f"{kind.__name__}: {isinstance(error, kind)}", flush=True)
    if FAULT.startswith("refused") and RANK == 1:
        signal.pause()  # until the test has seen the error of rank 0
    raise
print("DONE", flush=True)
