"""Lock of a model_dir: only one training at a time may write there."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext.checkpoints.file_errors import cannot_save, is_local
from hostopt import lock_file
from hostopt.cluster.tf_config import RING_JOBS, read_tf_config
from hostopt.connect import exit_with_error_code

_log = tf.get_logger()

_RETRY_AFTER_S = 0.5
# NFS keeps the locks of a crashed host until their lease ends, by default after 90 s.
_LEASE_S = 100.0


@contextlib.contextmanager
def training_in(
    model_dir: str, communicator: hostopt.Communicator | None = None
) -> Iterator[None]:
    """Scope in which no other run trains in a model_dir; a process may enter it repeatedly.

    Rank 0 holds the lock. If the holder is on another host, or locked before this host was booted,
    rank 0 retries for a while, as that host may have crashed. It alone raises an error if it
    cannot lock. Collective with a communicator; a process that trains alone has none.
    """
    exit_with_error_code()  # a program without a ring has not called it
    path = _path(model_dir) if communicator is None or communicator.rank == 0 else ""
    until_s = time.monotonic() + _LEASE_S
    with contextlib.ExitStack() as stack:
        is_held = False
        while not is_held:
            is_held = not path or _acquire(path, until_s)
            if is_held and path:
                stack.callback(lock_file.release, path)
            if communicator is not None:
                value = np.array(is_held)
                is_held = bool(communicator.broadcast(value, name="rank 0 has locked model_dir"))
            if not is_held:
                time.sleep(_RETRY_AFTER_S)
        if communicator is not None and path:
            note_ring(model_dir, communicator.transport.cluster)
        yield


def note_ring(model_dir: str, cluster: hostopt.Cluster) -> None:
    """Notes in the lock that this process holds where `hostopt status` can ask."""
    if cluster.size > 1:
        lock_file.note_ring(_path(model_dir), [task.address for task in cluster.ring])


def training_without_ring(model_dir: str, config: Any) -> contextlib.AbstractContextManager[None]:
    """Returns `training_in` of a process that is not part of a ring.

    Only the chief needs the lock. TensorFlow's distribute coordinator sets `is_chief` in the
    RunConfig of every task, so TF_CONFIG decides if it runs.
    """
    _refuse_one_of_many(config)
    is_chief = config.is_chief
    tf_config = read_tf_config(os.environ)
    if getattr(config, "_distribute_coordinator_mode", None) and tf_config is not None:
        jobs, job, index = tf_config
        is_chief = index == 0 and job == next((name for name in RING_JOBS if name in jobs), job)
    return training_in(model_dir) if is_chief else contextlib.nullcontext()


def _refuse_one_of_many(config: Any) -> None:
    """Raises an error if this process would train alone, or wait for a chief that does."""
    visible = read_tf_config(dict(os.environ))  # a program of Horovod's API hides it
    jobs = visible[0] if visible is not None and isinstance(visible[0], dict) else {}
    size = sum(len(jobs.get(job, ())) for job in RING_JOBS)
    if size > 1 and "ps" not in jobs and config.train_distribute is None:
        raise hostopt.ConfigError(
            f"TF_CONFIG names {size} ranks, but the RunConfig has no train_distribute, so each "
            "would train alone. Give it a HostOffloadStrategy, or set TF_CONFIG before the "
            "RunConfig is created if the program runs unmodified"
        )


class LockCheckListener(tf.compat.v1.train.CheckpointSaverListener):
    """Checks, before a save, that no other run trains in a model_dir that was emptied.

    There is no check if this process has not locked the directory.
    """

    def __init__(self, model_dir: str) -> None:
        self._model_dir = model_dir

    def before_save(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
        """Checks the lock, and locks again if the lock file is gone."""
        path = _path(self._model_dir)
        try:
            is_kept = lock_file.keep(path)
        except OSError as error:
            raise cannot_save(path, error, lock_file.MAX_BYTES) from error
        if not is_kept:
            raise _in_use(self._model_dir, lock_file.last_holder(path))


def is_training(model_dir: str) -> bool:
    """Returns True if a run has locked a model_dir, as far as the file system shows it."""
    return is_local(model_dir) and lock_file.is_held(_path(model_dir))


def _acquire(path: str, until_s: float) -> bool:
    """True if this process holds the lock, or locks are not supported; False to retry."""
    model_dir = os.path.dirname(path)
    unchecked = f"cannot check if another run trains in model_dir {model_dir}"
    if not is_local(path):
        _warn_once(f"{unchecked}: it is not a local path. Make sure that none does")
        return True
    try:
        os.makedirs(model_dir, exist_ok=True)
        if lock_file.acquire(path):
            return True
    except OSError as error:
        if error.errno not in lock_file.NO_LOCKS:
            raise cannot_save(path, error, lock_file.MAX_BYTES) from error
        reason = f"its file system cannot lock {lock_file.TRAINING} ({error.strerror})"
        _warn_once(f"{unchecked}: {reason}. Make sure that none does")
        return True
    holder = lock_file.last_holder(path)
    if holder is not None and holder.is_elsewhere and time.monotonic() < until_s:
        _warn_once(
            f"model_dir {model_dir} is locked by {_name(holder)}. Waiting for up to "
            f"{_LEASE_S:.0f} s, as NFS keeps the lock of a crashed host for so long"
        )
        return False
    raise _in_use(model_dir, holder)


def _in_use(model_dir: str, holder: lock_file.Holder | None) -> hostopt.ConfigError:
    name = "another process" if holder is None else f"{_name(holder)},"
    return hostopt.ConfigError(
        f"model_dir {model_dir} is in use: {name} trains there. Wait until it has ended, or end "
        "it, or give this run another model_dir"
    )


def _name(holder: lock_file.Holder) -> str:
    return f"process {holder.pid} on host {holder.host}, since {holder.start}"


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


def _path(model_dir: str) -> str:
    directory = os.path.realpath(model_dir) if is_local(model_dir) else model_dir
    return os.path.join(directory, lock_file.TRAINING)
