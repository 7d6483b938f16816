"""Savers whose errors name the cause, and which leave no incomplete checkpoints."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_estimator import EstimatorSpec as StockSpec
from estimator_ext._tf_private import SaverHook, listeners_of, save_path, wrapped_saver
from estimator_ext.checkpoints.file_errors import cannot_save, remove
from estimator_ext.checkpoints.model_dir_lock import LockCheckListener
from estimator_ext.checkpoints.reading import is_intact, newest
from estimator_ext.spec import stock_spec
from hostopt.tensorflow.checksums import nbytes_of

# Temporary names of files that TensorFlow renames at the end; rank 0 alone writes them.
_TEMPORARY = re.compile(r"(checkpoint|graph\.pbtxt)\.tmp[0-9a-f]{32}")


def find_savers(hooks: Sequence[Any]) -> list[SaverHook]:
    """Returns the hooks that save checkpoints."""
    return [hook for hook in hooks if isinstance(hook, SaverHook)]


def has_saver(spec: StockSpec, hooks: Sequence[Any], config: Any) -> bool:
    """Returns True if the chief of a training saves checkpoints."""
    by_config = config.save_checkpoints_secs or config.save_checkpoints_steps
    return bool(by_config or _savers_of(spec, hooks))


def has_own_saver(spec: StockSpec) -> bool:
    """Returns True if the user provides the saver, which may rename or reshape variables."""
    is_in_scaffold = spec.scaffold is not None and spec.scaffold.saver is not None
    return is_in_scaffold or bool(tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SAVERS))


def add_saver(spec: StockSpec, hooks: Sequence[Any], config: Any, model_dir: str) -> StockSpec:
    """Adds the saver hook that the stock Estimator would add, if it would, as first chief hook."""
    if _savers_of(spec, hooks) or not has_saver(spec, hooks, config):
        return spec
    saver = SaverHook(
        model_dir,
        save_secs=config.save_checkpoints_secs,
        save_steps=config.save_checkpoints_steps,
        scaffold=spec.scaffold,
        save_graph_def=config.checkpoint_save_graph_def,
    )
    return stock_spec(spec, training_chief_hooks=[saver, *spec.training_chief_hooks])


def _savers_of(spec: StockSpec, hooks: Sequence[Any]) -> list[SaverHook]:
    return find_savers([*hooks, *spec.training_hooks, *spec.training_chief_hooks])


@contextlib.contextmanager
def checked_saver(hook: SaverHook, restored: str | None) -> Iterator[None]:
    """Scope of a training in which a saver hook reports failed saves and cleans up after them.

    If a save fails, the saver raises a `CheckpointError` and removes its incomplete files. (The
    stock class mistakes some errors of a full disk for the end of the data.) The saver does not
    save the restored checkpoint again: a failure in the middle of that would damage it. Files that
    a killed process has left are removed first. The hook is restored at the end, as it may serve
    another training.
    """
    path = save_path(hook)
    _remove_leftovers(path)
    with wrapped_saver(hook, lambda saver: _CheckedSaver(saver, restored)):
        listeners_of(hook).insert(0, LockCheckListener(os.path.dirname(path)))
        yield


class _CheckedSaver:
    def __init__(self, saver: tf.compat.v1.train.Saver, restored: str | None) -> None:
        self._saver = saver
        self._restored = restored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._saver, name)

    def save(self, session: Any, path: str, global_step: int, **options: Any) -> Any:
        checkpoint = f"{path}-{global_step}"
        if self._restored and os.path.abspath(checkpoint) == os.path.abspath(self._restored):
            return checkpoint
        existed = tf.io.gfile.exists(f"{checkpoint}.index")  # saved by an earlier process
        try:
            return self._saver.save(session, path, global_step=global_step, **options)
        except (tf.errors.OpError, OSError, ValueError) as error:
            variables = session.graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
            needed_bytes = sum(map(nbytes_of, variables))
            last = _remove_failed(checkpoint, existed)
            raise cannot_save(checkpoint, error, needed_bytes, last) from error


def _remove_failed(path: str, existed: bool) -> str | None:
    """Deletes the files of a failed save and returns the newest checkpoint.

    Only temporary files are deleted if the checkpoint is the newest one, or if it existed before
    and is still intact.
    """
    directory, name = os.path.split(path)
    last = None
    with contextlib.suppress(tf.errors.OpError, hostopt.CheckpointError):
        last = newest(directory)
        remove_all = last != path and not (existed and is_intact(path))
        for file in tf.io.gfile.listdir(directory):
            is_temporary = ".tempstate" in file or file.rstrip("/") == f"{name}_temp"
            if is_temporary and file.startswith((f"{name}.", f"{name}_temp")):
                tf.io.gfile.rmtree(os.path.join(directory, file))
            elif remove_all and file.startswith(f"{name}."):
                remove(os.path.join(directory, file))
    return last


def _remove_leftovers(path: str) -> None:
    """Deletes temporary files of a process that was killed while it saved under this name."""
    directory, name = os.path.split(path)
    of_saver = re.compile(rf"{re.escape(name)}-\d+(_temp|\..*\.tempstate\d+|\.input\.tmp)")
    with contextlib.suppress(tf.errors.OpError):  # the directory may not exist
        for entry in tf.io.gfile.listdir(directory):
            file = entry.rstrip("/")
            if of_saver.fullmatch(file) or _TEMPORARY.fullmatch(file):
                tf.io.gfile.rmtree(os.path.join(directory, file))
