"""Checks of this machine: shared memory, open files, model_dir, speeds of memory and bus."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import resource
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hostopt.collectives import shared_file
from hostopt.doctor.checking import NOTE, OK, WRONG, Finding
from hostopt.options import MIB

_TRIAL_PREFIX = ".hostopt-doctor-"
_DOCKER_SHM_BYTES = 64 * MIB
_FEW_FILES = 256
_DIGITS = 5 * "[0-9]"
_LITTLE_DISK_BYTES = 1024 * MIB


def shared_memory(directory: str = shared_file.DIRECTORY) -> Iterator[Finding]:
    """Checks the free space for ranks of one host."""
    remedy = (
        "ranks of one host reduce over the network if they need more: in Docker, set --shm-size"
    )
    try:
        stats = os.statvfs(directory)
    except OSError as error:
        yield Finding(NOTE, f"{directory} cannot be used ({error.strerror}): {remedy}")
        return
    size, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    text = f"{directory} has {free // MIB} MiB free of {size // MIB} MiB"
    if min(size - 1, free) < _DOCKER_SHM_BYTES:  # Docker's default is exactly this size
        yield Finding(NOTE, f"{text}: {remedy}")
    else:
        yield Finding(OK, text)
    with os.scandir(directory) as entries:
        buffers = [entry for entry in entries if entry.name.startswith(shared_file.PREFIX)]
    stale = 0
    for entry in buffers:
        with contextlib.suppress(FileNotFoundError):
            stale += time.time() - entry.stat().st_mtime >= shared_file.STALE_AFTER_S
    if stale:
        yield Finding(
            NOTE,
            f"{stale} files {directory}/{shared_file.PREFIX}* remain of ranks that were killed: "
            "the next run of the same user removes them",
        )


def open_files() -> Iterator[Finding]:
    """Checks the limit of open files and sockets."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < _FEW_FILES:
        yield Finding(
            NOTE, f"{limit} open files are allowed, which may be too few: run ulimit -n 1024"
        )
    else:
        yield Finding(OK, f"{limit} open files are allowed")


def model_dir(path: str | None) -> Iterator[Finding]:
    """Checks that checkpoints can be written, and names the newest one."""
    if path is None:
        yield Finding(NOTE, "model_dir was not checked: name it with --model-dir")
        return
    if "://" in path:
        yield Finding(NOTE, f"model_dir {path} is not a local path, so it was not checked")
        return
    directory = existing(path)
    name = f"model_dir {path}"
    if not os.path.exists(path):
        name += f" does not exist yet, {directory}"
    try:
        with trial_file(directory):
            pass
        free = shutil.disk_usage(directory).free
    except OSError as error:
        yield Finding(
            WRONG,
            f"{name} cannot be written to ({error.strerror or error}): use another directory, or "
            "correct its owner, mode or disk",
        )
        return
    text = f"{name} can be written to, {free // MIB} MiB are free"
    if free < _LITTLE_DISK_BYTES:
        yield Finding(NOTE, f"{text}, which may be too little for checkpoints")
    else:
        yield Finding(OK, text)
    yield from _newest_checkpoint(Path(path))


def existing(path: str) -> str:
    """Returns the directory, or its nearest existing parent, as an absolute path."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


@contextlib.contextmanager
def trial_file(directory: str) -> Iterator[str]:
    """Scope of a small file that is written like a checkpoint; yields its name without path."""
    name = _TRIAL_PREFIX + secrets.token_hex(8)
    path = Path(directory, name)
    draft = path.with_suffix(".tmp")
    written = os.urandom(4096)
    try:
        with draft.open("xb") as file:
            file.write(written)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
        if path.read_bytes() != written:
            raise OSError("a file does not contain the bytes that were written")
        yield name
    finally:
        for each in (draft, path):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                each.unlink()


def _newest_checkpoint(directory: Path) -> Iterator[Finding]:
    try:
        state = (directory / "checkpoint").read_text(errors="replace")
    except FileNotFoundError:
        yield Finding(NOTE, "model_dir has no checkpoint: a training starts at step 0")
        return
    except OSError as error:
        reason = error.strerror or error
        yield Finding(
            WRONG, f"{directory / 'checkpoint'} cannot be read ({reason}): correct or remove it"
        )
        return
    match = re.search(r'^model_checkpoint_path: "([^"\0]+)"$', state, re.MULTILINE)
    if not match:
        yield Finding(
            WRONG, f"{directory / 'checkpoint'} names no checkpoint: correct or remove it"
        )
        return
    prefix = directory / match[1]  # which may be absolute
    shards = glob.glob(f"{glob.escape(str(prefix))}.data-{_DIGITS}-of-{_DIGITS}")
    if not Path(f"{prefix}.index").exists() or not shards or len(shards) != int(shards[0][-5:]):
        yield Finding(
            WRONG,
            f"{directory / 'checkpoint'} names {prefix}, of which files are missing: set "
            "HOSTOPT_RESTORE_PREVIOUS=true to resume from the newest intact checkpoint",
        )
    else:
        yield Finding(NOTE, f"a training resumes from {prefix}")


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
    """Says how long a step is at least, from speeds in bytes per second."""
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
