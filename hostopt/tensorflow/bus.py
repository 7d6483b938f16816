"""Measures the bus between the host and its first GPU; `hostopt doctor` starts it as a process.

It prints one JSON object: bytes per second by memory and direction, or an empty one without a GPU.
"""

from __future__ import annotations

import json
import statistics
import time

import tensorflow as tf

from hostopt.tensorflow.background import HOST_DEVICE

_GPU = "/device:GPU:0"
_COPY_BYTES = 256 << 20
_COPIES = 5

v1 = tf.compat.v1


def speeds(device: str, copy_bytes: int = _COPY_BYTES) -> dict[str, float]:
    """Returns bytes per second between host and device, by memory and direction ("pinned to")."""
    measured: dict[str, float] = {}
    for memory in ("pageable", "pinned"):
        config = v1.ConfigProto(device_count={"CPU": 2})
        config.gpu_options.allow_growth = True
        config.gpu_options.force_gpu_compatible = memory == "pinned"
        with tf.Graph().as_default(), v1.Session(config=config) as session:
            with tf.device(HOST_DEVICE):
                host = tf.Variable(tf.zeros([copy_bytes // 4]))
            with tf.device(device):
                there = tf.Variable(tf.zeros([copy_bytes // 4]))
                to = there.assign(host.read_value(), read_value=False)
            with tf.device(HOST_DEVICE):
                back = host.assign(there.read_value(), read_value=False)
            session.run(v1.global_variables_initializer())
            for direction, operation in (("to", to), ("from", back)):
                times_s = []
                for _ in range(1 + _COPIES):
                    begin_s = time.perf_counter()
                    session.run(operation)
                    times_s.append(time.perf_counter() - begin_s)
                measured[f"{memory} {direction}"] = copy_bytes / statistics.median(times_s[1:])
    return measured


if __name__ == "__main__":
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    print(json.dumps(speeds(_GPU) if has_gpu else {}))
