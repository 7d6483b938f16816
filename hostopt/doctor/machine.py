"""What this machine gives a training: shared memory, files, a directory to write to."""

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

from hostopt import shared_file
from hostopt.doctor.checking import NOTE, OK, WRONG, Finding
from hostopt.options import MIB

__all__: list[str] = []

_TRIAL_PREFIX = ".hostopt-doctor-"
_DOCKER_SHM_BYTES = 64 * MIB
_FEW_FILES = 256
_DIGITS = 5 * "[0-9]"
_LITTLE_DISK_BYTES = 1024 * MIB


def shared_memory(directory: str = shared_file.DIRECTORY) -> Iterator[Finding]:
    """Whether there is room for what ranks of one host share."""
    remedy = "ranks of one host reduce over gRPC where they need more: in Docker, say --shm-size"
    try:
        found = os.statvfs(directory)
    except OSError as error:
        yield Finding(NOTE, f"{directory} cannot be used ({error.strerror}): {remedy}")
        return
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    text = f"{directory} has {free // MIB} MiB free of {size // MIB} MiB"
    if min(size - 1, free) < _DOCKER_SHM_BYTES:  # Docker's default is just this size
        yield Finding(NOTE, f"{text}: {remedy}")
    else:
        yield Finding(OK, text)
    with os.scandir(directory) as entries:
        ours = [entry for entry in entries if entry.name.startswith(shared_file.PREFIX)]
    stale = 0
    for entry in ours:
        with contextlib.suppress(FileNotFoundError):
            stale += time.time() - entry.stat().st_mtime >= shared_file.STALE_AFTER_S
    if stale:
        yield Finding(
            NOTE,
            f"{stale} files {directory}/{shared_file.PREFIX}* are left of ranks that were killed: "
            "the next run of the same user removes them",
        )


def open_files() -> Iterator[Finding]:
    """Whether a rank may open as many files and sockets as it is likely to."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < _FEW_FILES:
        yield Finding(NOTE, f"{limit} open files are allowed, which may be few: ulimit -n 1024")
    else:
        yield Finding(OK, f"{limit} open files are allowed")


def model_dir(path: str | None) -> Iterator[Finding]:
    """Whether checkpoints can be written, and which is the newest."""
    if path is None:
        yield Finding(NOTE, "no model_dir to look at: name it with --model-dir")
        return
    if "://" in path:
        yield Finding(NOTE, f"model_dir {path} is no local path: only TensorFlow sees it")
        return
    directory = existing(path)
    what = f"model_dir {path}"
    if not os.path.exists(path):
        what += f" does not exist yet, {directory}"
    try:
        with trial_file(directory):
            pass
        free = shutil.disk_usage(directory).free
    except OSError as error:
        yield Finding(
            WRONG,
            f"{what} cannot be written to ({error.strerror or error}): name another directory, or "
            "correct its owner, mode or disk",
        )
        return
    text = f"{what} can be written to, {free // MIB} MiB are free"
    if free < _LITTLE_DISK_BYTES:
        yield Finding(NOTE, f"{text}, which may be little for checkpoints")
    else:
        yield Finding(OK, text)
    yield from _newest_checkpoint(Path(path))


def existing(path: str) -> str:
    """The directory itself, or the nearest one above it that exists."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


@contextlib.contextmanager
def trial_file(directory: str) -> Iterator[str]:
    """A small file in a directory while it is needed, written as a checkpoint is.

    Args:
      directory: where.

    Yields:
      Its name, without the directory.

    Raises:
      OSError: it cannot be written, flushed, renamed, read or removed.
    """
    name = _TRIAL_PREFIX + secrets.token_hex(8)
    path = Path(directory, name)
    first = path.with_suffix(".tmp")
    written = os.urandom(4096)
    try:
        with first.open("xb") as file:
            file.write(written)
            file.flush()
            os.fsync(file.fileno())
        first.rename(path)
        if path.read_bytes() != written:
            raise OSError("a file holds other bytes than were written")
        yield name
    finally:
        for each in (first, path):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                each.unlink()


def _newest_checkpoint(directory: Path) -> Iterator[Finding]:
    try:
        state = (directory / "checkpoint").read_text(errors="replace")
    except FileNotFoundError:
        yield Finding(NOTE, "model_dir holds no checkpoint: a training begins at step 0")
        return
    except OSError as error:
        why = error.strerror or error
        yield Finding(
            WRONG, f"{directory / 'checkpoint'} cannot be read ({why}): correct or remove it"
        )
        return
    found = re.search(r'^model_checkpoint_path: "([^"\0]+)"$', state, re.MULTILINE)
    if not found:
        yield Finding(
            WRONG, f"{directory / 'checkpoint'} names no checkpoint: correct or remove it"
        )
        return
    prefix = directory / found[1]  # an absolute one stays as it is
    shards = glob.glob(f"{glob.escape(str(prefix))}.data-{_DIGITS}-of-{_DIGITS}")
    if not Path(f"{prefix}.index").exists() or not shards or len(shards) != int(shards[0][-5:]):
        yield Finding(
            WRONG,
            f"{directory / 'checkpoint'} names {prefix}, whose files are not all there: with "
            "HOSTOPT_RESTORE_PREVIOUS=true a training goes on from the newest that is whole",
        )
    else:
        yield Finding(NOTE, f"a training goes on from {prefix}")
