"""One training at a time in a model_dir: the lock that its chief holds."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext.file_errors import cannot_save
from hostopt import lock_file
from hostopt.connect import exit_with_error_code

__all__: list[str] = []

_log = tf.get_logger()

_NAME = "hostopt-training.lock"
_AGAIN_AFTER_S = 0.5
# NFS keeps the locks of a host that has crashed until their lease ends, after 90 s by default.
_LEASE_S = 100.0


@contextlib.contextmanager
def training_in(
    model_dir: str, communicator: hostopt.Communicator | None = None
) -> Iterator[None]:
    """Scope in which no other run trains in a model_dir; its process may enter it repeatedly.

    With several ranks, which enter it together, rank 0 holds the lock. If the holder is on another
    host, or was before this host has booted, it waits a while: that host may have crashed.

    Args:
      model_dir: of rank 0.
      communicator: the ring; None where this process trains alone.

    Yields:
      Nothing.

    Raises:
      hostopt.ConfigError: another run trains there; on rank 0.
      hostopt.CheckpointError: the lock cannot be written; on rank 0.
      hostopt.HostOptError: a rank failed, left or timed out.
    """
    exit_with_error_code()  # nothing else has done so in a program without a ring
    path = _path(model_dir) if communicator is None or communicator.rank == 0 else ""
    until_s = time.monotonic() + _LEASE_S
    with contextlib.ExitStack() as stack:
        is_held = False
        while not is_held:
            is_held = not path or _acquire(path, until_s)
            if is_held and path:
                stack.callback(lock_file.release, path)
            if communicator is not None:
                own = np.array(is_held)
                is_held = bool(communicator.broadcast(own, what="rank 0 has locked model_dir"))
            if not is_held:
                time.sleep(_AGAIN_AFTER_S)
        yield


class TrainingContinues(tf.compat.v1.train.CheckpointSaverListener):
    """Makes sure, before a save, that no other run has begun in a model_dir that was emptied.

    It raises a ConfigError where one has, and a CheckpointError where there is no directory.

    Args:
      model_dir: where a hook saves; nothing happens where this process does not train there.
    """

    def __init__(self, model_dir: str) -> None:
        self._model_dir = model_dir

    def before_save(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
        """Hold the lock still, or again."""
        path = _path(self._model_dir)
        try:
            is_kept = lock_file.keep(path)
        except OSError as error:
            raise cannot_save(path, error, lock_file.MOST_BYTES) from error
        if not is_kept:
            raise _in_use(self._model_dir, lock_file.last_holder(path))


def is_training(model_dir: str) -> bool:
    """Whether a run trains in a model_dir, as far as its file system tells.

    Args:
      model_dir: where.
    """
    return _is_local(model_dir) and lock_file.is_held(_path(model_dir))


def _acquire(path: str, until_s: float) -> bool:
    """True where this process holds the lock, or none can be had; False to try again."""
    model_dir = os.path.dirname(path)
    if not _is_local(path):
        _warn_once(model_dir, "it is no local path")
        return True
    try:
        os.makedirs(model_dir, exist_ok=True)
        if lock_file.acquire(path):
            return True
    except OSError as error:
        if error.errno in lock_file.NO_LOCKS:
            _warn_once(model_dir, f"its file system cannot lock {_NAME} ({error.strerror})")
            return True
        raise cannot_save(path, error, lock_file.MOST_BYTES) from error
    holder = lock_file.last_holder(path)
    if holder is not None and holder.is_elsewhere and time.monotonic() < until_s:
        _log_waiting(model_dir, holder)
        return False
    raise _in_use(model_dir, holder)


def _in_use(model_dir: str, holder: lock_file.Holder | None) -> hostopt.ConfigError:
    who = "another process"
    if holder is not None:
        who = f"process {holder.pid} on host {holder.host}, since {holder.start},"
    return hostopt.ConfigError(
        f"model_dir {model_dir} is in use: {who} trains there. Wait until it has ended, or end "
        "it, or give this run a model_dir of its own"
    )


def _path(model_dir: str) -> str:
    directory = os.path.realpath(model_dir) if _is_local(model_dir) else model_dir
    return os.path.join(directory, _NAME)


def _is_local(path: str) -> bool:
    return "://" not in path


@functools.cache
def _warn_once(model_dir: str, why: str) -> None:
    text = "cannot know whether another run trains in model_dir %s: %s. Make sure that none does"
    _log.warning(text, model_dir, why)


@functools.cache
def _log_waiting(model_dir: str, holder: lock_file.Holder) -> None:
    _log.warning(
        "model_dir %s is locked by process %d on host %s, since %s: waits for up to %.0f s, as "
        "NFS keeps the lock of a host that has crashed for so long",
        *(model_dir, holder.pid, holder.host, holder.start, _LEASE_S),
    )
