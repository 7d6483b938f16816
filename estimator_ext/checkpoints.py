"""Checkpoints that cannot be written or read: what is wrong, and the newest that is whole."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint_management

import hostopt
from estimator_ext import input_state
from estimator_ext.file_errors import cannot_save, cause, remove
from estimator_ext.model_dir_lock import TrainingContinues

__all__: list[str] = []

_log = tf.get_logger()

_STILL_READING_S = 10.0
_NO_NUMBERS = (tf.resource, tf.variant)  # tensors that cannot be read into Python
# How TensorFlow's reader says that a file is damaged; memory, where a length is.
_UNREADABLE = (tf.errors.OpError, IndexError, MemoryError)
# Files that TensorFlow renames in the end, all written by rank 0 alone.
_DRAFT = re.compile(r"(checkpoint|graph\.pbtxt)\.tmp[0-9a-f]{32}")


# -- reading -------------------------------------------------------------------------------


def check(path: str) -> None:
    """Read a checkpoint as a whole, one tensor at a time, each of which has a checksum.

    Args:
      path: its prefix, such as ``model_dir/model.ckpt-5``.

    Raises:
      hostopt.CheckpointError: a file is missing, cut or changed; names it.
    """
    part = "index"
    try:
        reader = tf.compat.v1.train.NewCheckpointReader(path)
        for name, dtype in sorted(reader.get_variable_to_dtype_map().items()):
            part = f"data-*, which holds {name!r}"
            if dtype not in _NO_NUMBERS:
                reader.get_tensor(name)
    except _UNREADABLE as error:
        raise hostopt.CheckpointError(f"cannot read {path}.{part}: {cause(error)}") from error


def is_whole(path: str) -> bool:
    """Whether a checkpoint is there and undamaged.

    Args:
      path: its prefix.

    Returns:
      True where all of it can be read.
    """
    try:
        check(path)
    except hostopt.CheckpointError:
        return False
    return True


def newest(model_dir: str) -> str | None:
    """The checkpoint that the file `checkpoint` names, which need not be there.

    Args:
      model_dir: where the file is.

    Returns:
      Its path; None where there is no such file.

    Raises:
      hostopt.CheckpointError: the file names none.
    """
    file = os.path.join(model_dir, "checkpoint")
    if not tf.io.gfile.exists(file):
        return None
    state = None
    with contextlib.suppress(ValueError):  # of an empty one
        state = tf.train.get_checkpoint_state(model_dir)
    if state is None:
        raise hostopt.CheckpointError(f"{file} is empty or damaged, and names no checkpoint")
    return str(state.model_checkpoint_path)


def check_newest(model_dir: str, restore_previous: bool) -> None:
    """Make sure that the checkpoint from which a training goes on can be read.

    Args:
      model_dir: where TensorFlow looks for it.
      restore_previous: True goes back to the newest that is whole, where the newest is damaged.

    Raises:
      hostopt.CheckpointError: the newest is damaged, or it is not known which that is.
    """
    path = None
    try:
        path = newest(model_dir)
        if path is None:
            _check_has_none(model_dir)
        else:
            _check_all(path)
        return
    except hostopt.CheckpointError as error:
        damage = error
    found = _all(model_dir, like=path)
    whole = next(filter(_can_go_on_from, found), None)
    if whole is None:
        raise hostopt.CheckpointError(
            f"{damage}. No other checkpoint in {model_dir} is whole: give another model_dir, or "
            "empty this one to begin anew"
        ) from damage
    if not restore_previous:
        raise hostopt.CheckpointError(
            f"{damage}. The newest whole checkpoint is {whole}: to go on from there, use `hostopt "
            "run --restore-previous`, or run the same command with HOSTOPT_RESTORE_PREVIOUS=true; "
            "to begin anew, give another model_dir, or empty this one",
            last_checkpoint=whole,
        ) from damage
    _log.warning("%s. Training goes on from %s, as restore_previous says", damage, whole)
    older = [path for path in found if _step(path) <= _step(whole)]
    checkpoint_management.update_checkpoint_state_internal(
        model_dir, whole, older[::-1], save_relative_paths=True
    )


def check_on_rank_0(
    communicator: hostopt.Communicator, model_dir: str, restore_previous: bool
) -> None:
    """`check_newest` on rank 0, however long it takes; all ranks call this together.

    Args:
      communicator: the ring; the others hear now and then that rank 0 still reads.
      model_dir: of rank 0.
      restore_previous: as `check_newest` takes it.

    Raises:
      hostopt.CheckpointError: on rank 0, what `check_newest` has found.
      hostopt.HostOptError: a rank failed, left or timed out.
    """
    pause_s = min(_STILL_READING_S, communicator.transport.options.collective_timeout_s / 3)
    checking: Future[None] = Future()

    def check_it() -> None:
        try:
            checking.set_result(check_newest(model_dir, restore_previous))
        except BaseException as error:
            checking.set_exception(error)

    if communicator.rank == 0:  # beside the main thread, which tells the others
        threading.Thread(target=check_it, daemon=True, name="hostopt-checkpoint").start()
    is_read = False
    while not is_read:
        own = communicator.rank == 0 and bool(wait([checking], pause_s).done)
        is_read = bool(communicator.broadcast(np.array(own), what="the newest checkpoint is read"))
    if communicator.rank == 0:
        checking.result()


def check_shared(call: str, cluster: hostopt.Cluster, model_dir: str) -> None:
    """Make sure that a rank that evaluates or predicts has what rank 0 has saved.

    Args:
      call: such as "evaluate".
      cluster: the ring and this rank's place in it.
      model_dir: of this rank.

    Raises:
      hostopt.CheckpointError: this is another rank than 0, and its model_dir has no checkpoint.
    """
    if cluster.is_chief or cluster.rank is None or tf.train.latest_checkpoint(model_dir):
        return
    raise hostopt.CheckpointError(
        f"cannot {call} on rank {cluster.rank} ({cluster.task}): {model_dir} has no checkpoint "
        f"here, as rank 0 alone writes them. Call {call} on rank 0 alone (if estimator.config."
        "is_chief), or give all ranks one model_dir that they share",
        rank=cluster.rank,
    )


def _check_all(path: str) -> None:
    """`check`, and how far the data were read, too."""
    check(path)
    input_state.check(path)


def _check_has_none(model_dir: str) -> None:
    """Make sure that a training without a file `checkpoint` leaves no checkpoints behind.

    Those of step 0 do not count: nothing was trained, and a training that was killed while it
    saved its first has no file `checkpoint` yet.
    """
    found = [path for path in _all(model_dir) if _step(path) > 0 and _is_of_training(path)]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise hostopt.CheckpointError(
            f"{model_dir} has no file `checkpoint`, which says where a training goes on, but "
            f"{', '.join(map(os.path.basename, found[:3]))}{more}"
        )


def _is_of_training(path: str) -> bool:
    """Whether it is a training's, as far as can be known: others save into model_dir, too."""
    try:
        reader = tf.compat.v1.train.NewCheckpointReader(path)
    except _UNREADABLE:
        return True
    return bool(reader.has_tensor(tf.compat.v1.GraphKeys.GLOBAL_STEP))


def _can_go_on_from(path: str) -> bool:
    """Whether it is whole, and one of a training."""
    with contextlib.suppress(hostopt.CheckpointError):
        _check_all(path)
        return _is_of_training(path)
    return False


def _all(model_dir: str, like: str | None = None) -> list[str]:
    """The checkpoints in a directory, whole or not, newest first; with `like` of one name."""
    if not tf.io.gfile.isdir(model_dir):
        return []
    names = tf.io.gfile.listdir(model_dir)
    found = [name[: -len(".index")] for name in names if re.search(r"-\d+\.index$", name)]
    paths = [os.path.join(model_dir, name) for name in sorted(found, key=_step, reverse=True)]
    return [path for path in paths if like is None or _name(path) == _name(like)]


def _name(path: str) -> str:
    return os.path.basename(path).rpartition("-")[0]


def _step(path: str) -> int:
    return int(path.rpartition("-")[2])


# -- writing -------------------------------------------------------------------------------


@contextlib.contextmanager
def saving_well(
    hook: tf.compat.v1.train.CheckpointSaverHook, restored: str | None
) -> Iterator[None]:
    """Scope of a training, in which a hook saves what is not saved yet, and says why it cannot.

    It raises a `CheckpointError` where it cannot save, and leaves nothing half written; TensorFlow
    takes some errors of a full disk for the end of the data. The first save of a training that
    goes on would write the very checkpoint again that was restored, and an end in the middle of
    that would damage it. What a save that was killed has left is removed first. In the end the
    hook is as it was, for the next training.

    Args:
      hook: one that saves.
      restored: path of the checkpoint from which the training goes on, if there is one.

    Yields:
      Nothing.
    """
    _remove_drafts(hook._save_path)
    get_saver, timer, listeners = hook._get_saver, hook._timer, list(hook._listeners)

    def get_telling_saver() -> Any:
        saver = get_saver()
        return saver and _TellingSaver(saver, restored)

    hook._get_saver = get_telling_saver
    hook._listeners.insert(0, TrainingContinues(os.path.dirname(hook._save_path)))
    try:
        yield
    finally:
        hook._get_saver, hook._timer, hook._listeners = get_saver, timer, listeners


class _TellingSaver:
    """A saver whose `save` raises what a user can understand."""

    def __init__(self, saver: tf.compat.v1.train.Saver, restored: str | None) -> None:
        self._saver = saver
        self._restored = restored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._saver, name)

    def save(self, session: Any, path: str, global_step: int, **options: Any) -> Any:
        checkpoint = f"{path}-{global_step}"
        if self._restored and os.path.abspath(checkpoint) == os.path.abspath(self._restored):
            return checkpoint
        was_there = tf.io.gfile.exists(f"{checkpoint}.index")  # of another life
        try:
            return self._saver.save(session, path, global_step=global_step, **options)
        except (tf.errors.OpError, OSError, ValueError) as error:
            needed_bytes = sum(
                (variable.shape.num_elements() or 0) * variable.dtype.base_dtype.size
                for variable in session.graph.get_collection(
                    tf.compat.v1.GraphKeys.GLOBAL_VARIABLES
                )
            )
            last = _remove_failed(checkpoint, was_there)
            raise cannot_save(checkpoint, error, needed_bytes, last) from error


def _remove_failed(path: str, was_there: bool) -> str | None:
    """Delete what a failed save has left; returns the newest checkpoint that is named.

    Of that one, and of one that was there before and still is whole, temporary files only.
    """
    directory, name = os.path.split(path)
    last = None
    with contextlib.suppress(tf.errors.OpError, hostopt.CheckpointError):
        last = newest(directory)
        all_of_it = last != path and not (was_there and is_whole(path))
        for found in tf.io.gfile.listdir(directory):
            is_temporary = ".tempstate" in found or found.rstrip("/") == f"{name}_temp"
            if is_temporary and found.startswith((f"{name}.", f"{name}_temp")):
                tf.io.gfile.rmtree(os.path.join(directory, found))
            elif all_of_it and found.startswith(f"{name}."):
                remove(os.path.join(directory, found))
    return last


def _remove_drafts(save_path: str) -> None:
    """Delete what a process that was killed while it saved under this name has left.

    Args:
      save_path: path of the checkpoints, without their steps.
    """
    directory, name = os.path.split(save_path)
    of_saver = re.compile(rf"{re.escape(name)}-\d+(_temp|\..*\.tempstate\d+|\.input\.tmp)")
    with contextlib.suppress(tf.errors.OpError):  # no such directory yet; or left as it was
        for found in tf.io.gfile.listdir(directory):
            file = found.rstrip("/")
            if of_saver.fullmatch(file) or _DRAFT.fullmatch(file):
                tf.io.gfile.rmtree(os.path.join(directory, file))
