"""Sets TF_CONFIG itself, and starts its workers with `multiprocessing`.

The first argument is a JSON object: "method" is how to start them, "before" what the parent does
first, "worker" the function that each worker calls, "daemon" True for daemonic workers. The
cluster is that of the parent's TF_CONFIG.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

kept: list[Any] = []  # gRPC ends its threads with its last object


def write_line(text: str) -> None:
    """Writes a line in one call, so that the lines of two processes do not mix."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def train_estimator(rank: int, other_ended: Any) -> None:
    from one_weight import model_fn

    import estimator_ext

    estimator_ext.install()
    strategy = estimator_ext.HostOffloadStrategy()

    def input_fn() -> tf.data.Dataset:
        features = np.full([4, 1], rank + 1, np.float32)
        return tf.data.Dataset.from_tensors((features, np.ones([4, 1], np.float32))).repeat()

    class Show(tf.compat.v1.train.SessionRunHook):
        def end(self, session: tf.compat.v1.Session) -> None:
            (weight,) = session.graph.get_collection("trainable_variables")
            write_line(f"WEIGHT {session.run(weight).ravel().tolist()}")

    config = estimator_ext.RunConfig(train_distribute=strategy)
    estimator_ext.Estimator(model_fn, None, config).train(input_fn, [Show()], steps=3)


def train_function(rank: int, other_ended: Any) -> None:
    import hostopt.tensorflow as hvd

    hvd.init()
    weight = tf.Variable(tf.fill([400, 400], float(rank)))
    hvd.broadcast_variables([weight], root_rank=0)

    @tf.function
    def step(x: tf.Tensor) -> None:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean(tf.matmul(x, weight))
        weight.assign_sub(tape.gradient(loss, [weight])[0])

    for x in tf.data.Dataset.from_tensors(tf.fill([400, 400], rank + 1.0)).repeat(3).prefetch(1):
        step(x)
    write_line(f"WEIGHT {tf.reduce_sum(weight).numpy()} of {hvd.size()}")


def return_early(rank: int, other_ended: Any) -> None:
    from hostopt import process_ring

    ring = process_ring.init()
    if rank == 1:
        return
    other_ended.wait()
    ring.named.barrier("the end")


def fail(rank: int, other_ended: Any) -> None:
    import hostopt.tensorflow as hvd

    hvd.init()
    if rank == 1:
        raise ZeroDivisionError("of rank 1")
    hvd.barrier()


def lose_tf_config(rank: int, other_ended: Any) -> None:
    import hostopt.tensorflow as hvd

    del os.environ["TF_CONFIG"]
    hvd.init()
    write_line(f"ALONE {hvd.size()}")


def operation() -> None:
    print(tf.constant(1.0) + 1.0)


def session() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        session.run(tf.constant(1.0) + 1.0)


def init() -> None:
    import hostopt.tensorflow as hvd

    hvd.init()


def nothing() -> None:
    """Leaves everything to the workers."""


def run(
    worker: Callable[[int, Any], None], jobs: dict[str, Any], rank: int, other_ended: Any
) -> None:
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": jobs, "task": task})
    worker(rank, other_ended)


def main() -> None:
    jobs = json.loads(os.environ.pop("TF_CONFIG"))["cluster"]
    settings = json.loads(sys.argv[1])
    globals()[settings.get("before", "nothing")]()
    context = multiprocessing.get_context(settings["method"])
    other_ended = context.Event()
    arguments = [(globals()[settings["worker"]], jobs, rank, other_ended) for rank in range(2)]
    workers = [
        context.Process(target=run, args=each, daemon=settings.get("daemon", False))
        for each in arguments
    ]
    for each in workers:
        each.start()
    workers[1].join()
    other_ended.set()
    workers[0].join()
    write_line(f"EXIT CODES {[each.exitcode for each in workers]}")


if __name__ == "__main__":
    main()
