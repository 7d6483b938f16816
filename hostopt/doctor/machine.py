"""Checks of this machine: packages, environment variables, memory, files, and speeds."""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from hostopt.collectives import shared_file
from hostopt.doctor.checking import Finding, note, ok, wrong
from hostopt.options import MIB, PREFIX, VARIABLES, Options
from hostopt.process import descriptors
from hostopt.versions import has_keras_3

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
        yield note(f"{directory} cannot be used ({error.strerror}): {remedy}")
        return
    size, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    text = f"{directory} has {free // MIB} MiB free of {size // MIB} MiB"
    has_little = min(size - 1, free) < _DOCKER_SHM_BYTES  # Docker's default is exactly this size
    yield note(f"{text}: {remedy}") if has_little else ok(text)
    with os.scandir(directory) as entries:
        buffers = [entry for entry in entries if entry.name.startswith(shared_file.PREFIX)]
    stale = 0
    for entry in buffers:
        with contextlib.suppress(FileNotFoundError):
            stale += time.time() - entry.stat().st_mtime >= shared_file.STALE_AFTER_S
    if stale:
        yield note(
            f"{stale} files {directory}/{shared_file.PREFIX}* remain of ranks that were killed: "
            "the next run of the same user removes them"
        )


def open_files() -> Iterator[Finding]:
    """Checks the limit of open files and sockets."""
    text = f"{descriptors.limit()} open files are allowed"
    is_low = descriptors.limit() < _FEW_FILES
    yield note(f"{text}, which may be too few: run ulimit -n 1024") if is_low else ok(text)


def model_dir(path: str | None) -> Iterator[Finding]:
    """Checks that checkpoints can be written, and names the newest one."""
    if path is None:
        yield note("model_dir was not checked: name it with --model-dir")
        return
    if "://" in path:
        yield note(f"model_dir {path} is not a local path, so it was not checked")
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
        yield wrong(
            f"{name} cannot be written to ({error.strerror or error}): use another directory, or "
            "correct its owner, mode or disk"
        )
        return
    text = f"{name} can be written to, {free // MIB} MiB are free"
    has_little = free < _LITTLE_DISK_BYTES
    yield note(f"{text}, which may be too little for checkpoints") if has_little else ok(text)
    yield from _newest_checkpoint(Path(path))


def existing(path: str) -> str:
    """Returns the directory, or its nearest existing parent, as an absolute path."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


@contextlib.contextmanager
def trial_file(directory: str) -> Iterator[str]:
    """Scope of a new directory, with a file that is written like a checkpoint; yields its name."""
    written = os.urandom(4096)
    with tempfile.TemporaryDirectory(prefix=_TRIAL_PREFIX, dir=directory) as trial:
        draft, path = Path(trial, "draft"), Path(trial, "file")
        with draft.open("xb") as file:
            file.write(written)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
        if path.read_bytes() != written:
            raise OSError("a file does not contain the bytes that were written")
        yield os.path.basename(trial)


def _newest_checkpoint(directory: Path) -> Iterator[Finding]:
    try:
        state = (directory / "checkpoint").read_text(errors="replace")
    except FileNotFoundError:
        yield note("model_dir has no checkpoint: a training starts at step 0")
        return
    except OSError as error:
        reason = error.strerror or error
        yield wrong(f"{directory / 'checkpoint'} cannot be read ({reason}): correct or remove it")
        return
    match = re.search(r'^model_checkpoint_path: "([^"\0]+)"$', state, re.MULTILINE)
    if not match:
        yield wrong(f"{directory / 'checkpoint'} names no checkpoint: correct or remove it")
        return
    prefix = directory / match[1]  # which may be absolute
    shards = glob.glob(f"{glob.escape(str(prefix))}.data-{_DIGITS}-of-{_DIGITS}")
    if not Path(f"{prefix}.index").exists() or not shards or len(shards) != int(shards[0][-5:]):
        yield wrong(
            f"{directory / 'checkpoint'} names {prefix}, of which files are missing: set "
            "HOSTOPT_RESTORE_PREVIOUS=true to resume from the newest intact checkpoint"
        )
    else:
        yield note(f"a training resumes from {prefix}")


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
    yield ok(f"{threads} threads move {memory / 1e9:.3g} GB/s through host memory")
    if not glob.glob(gpus):
        return
    bus = _bus()
    if not bus:
        yield note("the bus to the GPU could not be measured: TensorFlow finds no GPU, or fails")
        return
    ways = ", ".join(f"{name} the GPU {value / 1e9:.3g}" for name, value in bus.items())
    yield ok(f"the bus to the GPU, in GB/s: {ways}")
    yield ok(least_step(memory, bus))


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


_TESTED_PYTHON = (3, 13)
_SHOWN = ("numpy", "grpcio", "protobuf", "tensorflow", "tf_keras")
_LEGACY_KERAS = "TF_USE_LEGACY_KERAS"
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


def installed() -> dict[str, str]:
    """Returns the versions of the installed packages that ranks compare."""
    found = {name: _version(name) for name in ("hostopt", *_SHOWN)}
    packages = {name: version for name, version in found.items() if version is not None}
    return {"Python": ".".join(map(str, sys.version_info[:3])), **packages}


def versions() -> Iterator[Finding]:
    """Checks the requirements of hostopt, and those of the packages that it requires."""
    packages = installed()
    if "hostopt" not in packages:
        yield wrong("hostopt is not installed: run pip install in its repository")
        return
    unmet = sorted(set(_unmet()))
    yield from map(wrong, unmet)
    if sys.version_info[:2] > _TESTED_PYTHON:
        newest = ".".join(map(str, _TESTED_PYTHON))
        yield note(
            f"Python {packages['Python']} is newer than {newest}, the newest tested version"
        )
    if not unmet:
        yield ok(", ".join(f"{name} {version}" for name, version in packages.items()))


def _unmet() -> Iterator[str]:
    from packaging.requirements import Requirement  # installed with TensorFlow
    from packaging.specifiers import SpecifierSet

    direct = [Requirement(text) for text in importlib.metadata.requires("hostopt") or ()]
    packages = ["hostopt", *(each.name for each in direct if _applies(each))]
    python = ".".join(map(str, sys.version_info[:3]))
    for package in packages:
        if _version(package) is None:
            continue  # reported as a requirement of hostopt
        wanted = ",".join(importlib.metadata.metadata(package).get_all("Requires-Python") or ())
        if python not in SpecifierSet(wanted):
            yield f"Python is {python}, but {package} requires {wanted}: use another Python"
        for text in importlib.metadata.requires(package) or ():
            requirement = Requirement(text)
            if not _applies(requirement):
                continue
            version = _version(requirement.name)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                needed = f"{requirement.name}{requirement.specifier}"
                yield (
                    f"{requirement.name} is {version or 'not installed'}, but {package} "
                    f"{_version(package)} requires {requirement.specifier or 'it'}: "
                    f"pip install '{needed}'"
                )


def _applies(requirement: Any) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def keras(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks that `tf.keras` is Keras 2, which Estimator needs."""
    value = environ.get(_LEGACY_KERAS)
    if not has_keras_3():
        yield ok("tf.keras is Keras 2, included in TensorFlow")
    elif value is None:
        yield note(
            f"{_LEGACY_KERAS} is not set: a program that uses tf.keras before it imports "
            f"estimator_ext gets Keras 3. Set {_LEGACY_KERAS}=1, as `hostopt run` does"
        )
    elif value in ("1", "true", "True"):
        yield ok(f"{_LEGACY_KERAS} is {value}: tf.keras is Keras 2")
    else:
        yield wrong(
            f"{_LEGACY_KERAS} is {value!r}, so tf.keras is Keras 3, which does not support "
            "Estimator: set it to 1"
        )


def variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the names and values of the HOSTOPT_* variables."""
    Options().with_environment(environ)
    names = sorted(name for name in environ if name.startswith(PREFIX))
    unknown = [name for name in names if name not in VARIABLES]
    for name in unknown:
        yield note(f"hostopt does not read {name}")
    if not unknown:
        yield ok(f"HOSTOPT_* variables: {', '.join(names) or 'none is set'}")


def proxies(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Notes the proxies in the environment."""
    names = sorted(name for name in environ if name.lower() in _PROXIES)
    text = f"{', '.join(names)}: ignored, as ranks connect to each other directly"
    yield note(text) if names else ok("no proxies")
