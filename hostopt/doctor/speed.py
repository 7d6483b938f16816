"""Speed of host memory and of the bus to the GPU, and what it allows a training."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hostopt.doctor.checking import NOTE, OK, Finding

_ARRAY_BYTES = 16 << 20  # of each thread, twice: more than its share of most caches
_MAX_THREADS = 16
_ROUNDS = 3
_BUS_S = 60.0
_PARAMETERS = 100e6
_ADAM_BYTES = 28  # of each parameter: reads gradient, variable and two slots, writes three of them
_COPY_BYTES = 4


def speeds(gpus: str = "/dev/nvidia[0-9]*") -> Iterator[Finding]:
    """Measures host memory and, if there is a GPU, the bus; says what a step needs at least."""
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    memory = _memory_bytes_per_s(threads)
    yield Finding(OK, f"{threads} threads move {memory / 1e9:.3g} GB/s through host memory")
    if not glob.glob(gpus):
        return
    bus = _bus()
    if not bus:
        yield Finding(
            NOTE, "the bus to the GPU could not be measured: TensorFlow finds no GPU, or fails"
        )
        return
    yield Finding(
        OK,
        "the bus to the GPU, in GB/s: "
        + ", ".join(f"{name} the GPU {value / 1e9:.3g}" for name, value in bus.items()),
    )
    yield Finding(OK, least_step(memory, bus))


def least_step(memory: float, bus: Mapping[str, float]) -> str:
    """Says how long the parts of a step are that do not depend on the model.

    Args:
      memory: bytes per second of host memory.
      bus: bytes per second by memory and direction.
    """
    update_ms = 1e3 * _PARAMETERS * _ADAM_BYTES / memory
    slowest = min(value for name, value in bus.items() if name.startswith("pinned"))
    copy_ms = 1e3 * _PARAMETERS * _COPY_BYTES / slowest
    return (
        f"100 million float32 parameters need {update_ms:.3g} ms for Adam and {copy_ms:.3g} ms "
        "for a copy: a model whose backward pass takes longer for so many can hide them"
    )


def _memory_bytes_per_s(threads: int) -> float:
    """Returns the speed of copies, of which each byte is read and written once."""
    best_s = float("inf")
    with ThreadPoolExecutor(threads) as pool:  # whose threads touch the memory of their node first
        shapes = [(2, _ARRAY_BYTES)] * threads
        arrays = list(pool.map(lambda shape: np.ones(shape, np.uint8), shapes))
        for _ in range(_ROUNDS):
            begin_s = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(pair[0], pair[1]), arrays))
            best_s = min(best_s, time.perf_counter() - begin_s)
    return 2 * _ARRAY_BYTES * threads / best_s


def _bus() -> dict[str, float]:
    """Returns the speeds of the bus; none if they cannot be measured."""
    command = [sys.executable, "-m", "hostopt.tensorflow.bus"]
    try:
        ended = subprocess.run(command, capture_output=True, timeout=_BUS_S, check=True, text=True)
        bus: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}
    return bus
