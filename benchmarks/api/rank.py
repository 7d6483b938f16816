"""One process of the benchmark: calls of Horovod's API, made by Horovod or by hostopt."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import tensorflow as tf

from benchmarks import common

_WARM_UP = 10
BATCH = 64


def times_ms(call: Callable[[], Any], repetitions: int) -> float:
    """Returns the median time of a call."""
    for _ in range(_WARM_UP):
        call()
    times_s = []
    for _ in range(repetitions):
        begin_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - begin_s)
    return 1e3 * common.median(times_s)


def eager_calls(hvd: Any, repetitions: int) -> dict[str, float]:
    """Times all-reduces that are called eagerly."""
    large = tf.ones([16 << 10])
    small = [tf.ones([2560]) for _ in range(100)]
    return {
        "64 KiB": times_ms(lambda: hvd.allreduce(large, name="large"), repetitions),
        "100 x 10 KiB, one by one": times_ms(
            lambda: [hvd.allreduce(each, name=f"small {i}") for i, each in enumerate(small)],
            max(1, repetitions // 10),
        ),
        "100 x 10 KiB, grouped": times_ms(
            lambda: hvd.grouped_allreduce(small, name="group"), max(1, repetitions // 10)
        ),
    }


def fit_steps_per_s(hvd: Any, hidden: int, steps: int) -> float:
    """Returns the median speed of three epochs of `fit` of the MNIST network."""
    keras = tf.keras
    model = keras.Sequential(
        [
            keras.layers.Conv2D(32, 3, activation="relu", input_shape=(28, 28, 1)),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(hidden, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), loss)
    random = np.random.RandomState(0)
    x = random.rand(8 * BATCH, 28, 28, 1).astype(np.float32)
    y = random.randint(0, 10, 8 * BATCH)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat().prefetch(2)

    class Rate(keras.callbacks.Callback):
        """Times epochs."""

        def __init__(self) -> None:
            super().__init__()
            self.times_s: list[float] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.begin_s = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.times_s.append(time.perf_counter() - self.begin_s)

    rate = Rate()
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(data, epochs=4, steps_per_epoch=steps, verbose=0, callbacks=[broadcast, rate])
    return steps / common.median(rate.times_s[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=["hostopt", "horovod"], required=True)
    parser.add_argument("--repetitions", type=int, required=True, help="of eager calls")
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps of an epoch")
    args = parser.parse_args()
    if args.system == "horovod":
        import horovod.tensorflow.keras as hvd_keras
        from horovod import tensorflow as hvd
    else:
        import hostopt.tensorflow.keras as hvd_keras
        from hostopt import tensorflow as hvd
    hvd.init()
    calls = eager_calls(hvd, args.repetitions)
    common.report(calls_ms=calls, fit=fit_steps_per_s(hvd_keras, args.hidden, args.steps))


if __name__ == "__main__":
    main()
