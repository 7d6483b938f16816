"""Checks of this machine: shared memory, open files and model_dir."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import resource
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

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
    """Creates a small file in the same way as a checkpoint, and removes it at the end.

    Yields:
      The name of the file, without the directory.

    Raises:
      OSError: the file cannot be written, flushed, renamed, read or removed.
    """
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
