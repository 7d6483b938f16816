"""Finds the newest checkpoint and checks that it is intact."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterable
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext._tf_private import (
    keys_by_name,
    partitions,
    saved_as,
    saved_partitions,
    update_checkpoint_state,
)
from estimator_ext.checkpoints import input_state_file
from estimator_ext.checkpoints.file_errors import cause

_log = tf.get_logger()

_REPORT_EVERY_S = 10.0  # while rank 0 reads a checkpoint
_NOT_READABLE = (tf.resource, tf.variant)  # dtypes that Python cannot read
# Errors of TensorFlow's reader for a damaged file; MemoryError for a damaged length.
_DAMAGED = (tf.errors.OpError, IndexError, MemoryError)


def check(path: str) -> None:
    """Reads all tensors of a checkpoint, one at a time, and verifies their checksums."""
    part = "index"
    try:
        reader = tf.compat.v1.train.NewCheckpointReader(path)
        for name, dtype in sorted(reader.get_variable_to_dtype_map().items()):
            part = f"data-*, which holds {name!r}"
            if dtype not in _NOT_READABLE:
                _read(reader, name)
    except _DAMAGED as error:
        raise hostopt.CheckpointError(f"cannot read {path}.{part}: {cause(error)}") from error


def _read(reader: Any, name: str) -> None:
    try:
        reader.get_tensor(name)
    except ValueError as error:
        # an optimizer in a variable scope names the slots of each partition as another variable
        if "sufficient slices" not in str(error):
            raise


def is_intact(path: str) -> bool:
    """Returns True if a checkpoint exists and can be read completely."""
    try:
        check(path)
    except hostopt.CheckpointError:
        return False
    return True


def check_shapes(path: str, variables: Iterable[tf.Variable]) -> None:
    """Checks that variables have the shapes that they have in a checkpoint.

    TensorFlow restores a variable of any shape without an error. Variables that the checkpoint
    lacks are not checked.
    """
    shapes = tf.compat.v1.train.NewCheckpointReader(path).get_variable_to_shape_map()
    for variable in variables:
        name, shape = saved_as(variable)
        if name in shapes and not shape.is_compatible_with(shapes[name]):
            raise hostopt.CheckpointError(
                f"checkpoint {path} has {name!r} of shape {shapes[name]}, the model has it of "
                f"shape {shape.as_list()}. Give another model_dir, or the model that "
                "wrote the checkpoint"
            )


def check_partitions(path: str | None) -> None:
    """Checks that the default graph partitions variables as the training of a checkpoint did.

    A lookup in a partitioned table would read the rows of others, as their order differs.
    """
    here = partitions(tf.compat.v1.global_variables())
    if path is None or not here or not tf.io.gfile.exists(f"{path}.meta"):
        return
    with tf.io.gfile.GFile(f"{path}.meta", "rb") as file:
        trained = saved_partitions(file.read())
    for name in sorted(here.keys() & trained.keys()):
        if here[name] != trained[name]:
            raise hostopt.ConfigError(
                f"variable {name!r} has {trained[name]} partitions in the training of {path}, and "
                f"{here[name]} here. Give its partitioner a number of partitions that depends "
                "neither on the mode nor on the number of ranks"
            )


def read_step(path: str) -> int:
    """Returns the global_step in a checkpoint, which was saved by name or by object."""
    reader = tf.compat.v1.train.NewCheckpointReader(path)
    key = _key_of_step(path, reader)
    if key is None:
        raise hostopt.CheckpointError(
            f"checkpoint {path} has no global_step, so training cannot resume from it. If "
            "model_fn saves a tf.train.Checkpoint, give it "
            "step=tf.compat.v1.train.get_global_step()"
        )
    return int(reader.get_tensor(key))


def first_step(communicator: hostopt.Communicator, model_dir: str) -> int:
    """Returns global_step of rank 0's newest checkpoint, or 0. Collective."""
    path = tf.train.latest_checkpoint(model_dir) if communicator.rank == 0 else None
    step = np.array(read_step(path) if path else 0, np.int64)
    return int(communicator.broadcast(step, name="the step to start from"))


def _key_of_step(path: str, reader: Any) -> str | None:
    name = tf.compat.v1.GraphKeys.GLOBAL_STEP
    if reader.has_tensor(name):
        return str(name)
    with contextlib.suppress(tf.errors.NotFoundError):  # it was not saved by object either
        return keys_by_name(path).get(name)
    return None


def newest(model_dir: str) -> str | None:
    """Returns the path that the file `checkpoint` names, which need not exist.

    Returns None if there is no file `checkpoint`, and raises a CheckpointError if it names none.
    """
    file = os.path.join(model_dir, "checkpoint")
    if not tf.io.gfile.exists(file):
        return None
    state = None
    with contextlib.suppress(ValueError):  # of an empty file
        state = tf.train.get_checkpoint_state(model_dir)
    if state is None:
        raise hostopt.CheckpointError(f"{file} is empty or damaged, and names no checkpoint")
    return str(state.model_checkpoint_path)


def check_newest(model_dir: str, restore_previous: bool) -> None:
    """Checks that a training can resume from the newest checkpoint.

    If it is damaged or unknown, a CheckpointError is raised, or `restore_previous` makes the
    newest intact checkpoint the newest one.
    """
    path = None
    try:
        path = newest(model_dir)
        if path is None:
            _check_has_none(model_dir)
        else:
            _check_with_input_state(path)
        return
    except hostopt.CheckpointError as error:
        damage = error
    if path is not None:
        input_state_file.check_format(path)
    paths = _list(model_dir, like=path)
    try:
        intact = next(filter(_can_resume_from, paths), None)
    except hostopt.CheckpointError as error:
        raise hostopt.CheckpointError(f"{damage}. {error}") from error
    if intact is None:
        raise hostopt.CheckpointError(
            f"{damage}. No other checkpoint in {model_dir} is intact: give another model_dir, or "
            "empty this one to start over"
        ) from damage
    if not restore_previous:
        raise hostopt.CheckpointError(
            f"{damage}. The newest intact checkpoint is {intact}: to resume from it, use `hostopt "
            "run --restore-previous`, or run the same command with HOSTOPT_RESTORE_PREVIOUS=true; "
            "to start over, give another model_dir, or empty this one",
            last_checkpoint=intact,
        ) from damage
    _log.warning("%s. Training resumes from %s because of restore_previous", damage, intact)
    kept = [path for path in paths if _step(path) <= _step(intact)]
    update_checkpoint_state(model_dir, intact, kept[::-1], save_relative_paths=True)


def check_on_rank_0(
    communicator: hostopt.Communicator, model_dir: str, restore_previous: bool
) -> None:
    """Runs `check_newest` on rank 0. Collective: all ranks must call it.

    Rank 0 sends progress messages, so that the check may take longer than collective_timeout_s.
    """
    pause_s = min(_REPORT_EVERY_S, communicator.transport.options.collective_timeout_s / 3)
    result: Future[None] = Future()

    def run() -> None:
        try:
            check_newest(model_dir, restore_previous)
            result.set_result(None)
        except BaseException as error:
            result.set_exception(error)

    if communicator.rank == 0:  # in a thread, as the main thread sends the progress messages
        threading.Thread(target=run, daemon=True, name="hostopt-checkpoint").start()
    is_read = False
    while not is_read:
        is_done = communicator.rank == 0 and bool(wait([result], pause_s).done)
        value = communicator.broadcast(np.array(is_done), name="the newest checkpoint is read")
        is_read = bool(value)
    if communicator.rank == 0:
        result.result()


def check_shared(call: str, cluster: hostopt.Cluster, model_dir: str) -> None:
    """Checks that a rank that evaluates or predicts can see the checkpoints of rank 0."""
    if cluster.is_chief or cluster.rank is None or tf.train.latest_checkpoint(model_dir):
        return
    raise hostopt.CheckpointError(
        f"cannot {call} on rank {cluster.rank} ({cluster.task}): {model_dir} has no checkpoint "
        f"here, as rank 0 alone writes them. Call {call} on rank 0 alone (if estimator.config."
        "is_chief), or give all ranks a shared model_dir",
        rank=cluster.rank,
    )


def _check_with_input_state(path: str) -> None:
    check(path)
    input_state_file.read(path)


def _check_has_none(model_dir: str) -> None:
    """Checks that a model_dir without a file `checkpoint` has no checkpoints of a training.

    Checkpoints of step 0 do not count: nothing was trained, and a training that is killed while it
    saves its first checkpoint has no file `checkpoint` yet.
    """
    paths = [path for path in _list(model_dir) if _step(path) > 0 and _is_of_training(path)]
    if paths:
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        raise hostopt.CheckpointError(
            f"{model_dir} has no file `checkpoint`, which names the checkpoint to resume from, "
            f"but {', '.join(map(os.path.basename, paths[:3]))}{more}"
        )


def _is_of_training(path: str) -> bool:
    """True if a checkpoint has a global_step, or is damaged; other savers use model_dir too."""
    try:
        return _key_of_step(path, tf.compat.v1.train.NewCheckpointReader(path)) is not None
    except _DAMAGED:
        return True


def _can_resume_from(path: str) -> bool:
    input_state_file.check_format(path)  # raises, as it must not be passed over for an older one
    with contextlib.suppress(hostopt.CheckpointError):
        _check_with_input_state(path)
        return _is_of_training(path)
    return False


def _list(model_dir: str, like: str | None = None) -> list[str]:
    """Checkpoints in a directory, damaged or not, newest first; only those named like `like`."""
    name = ".*" if like is None else re.escape(os.path.basename(like).rpartition("-")[0])
    files = tf.io.gfile.listdir(model_dir) if tf.io.gfile.isdir(model_dir) else []
    found = [m[1] for m in map(re.compile(rf"({name}-\d+)\.index").fullmatch, files) if m]
    return [os.path.join(model_dir, each) for each in sorted(found, key=_step, reverse=True)]


def _step(path: str) -> int:
    return int(path.rpartition("-")[2])
