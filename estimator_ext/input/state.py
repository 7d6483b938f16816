"""Input state: the position of each rank in its data, saved with checkpoints and restored.

The state of ``model.ckpt-100`` is ``model.ckpt-100.input``. Rank 0 writes it before the
checkpoint, so that no checkpoint lacks it. It holds the position of each rank: the state of each
iterator, as tf.data saves it, including shuffle buffers, or the number of batches that were read.
Rank 0 collects the positions, as the ranks need not share a file system.

A training that starts in another process resumes its data at that position. It reads the data
from the beginning, as the stock Estimator does, if it runs in the same process, if the data had
ended on all ranks, or if its input_fn, number of ranks or kind of position has changed.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext._tf_private import GLOBAL_ITERATORS, listeners_of, save_path
from estimator_ext.checkpoints import input_state_file
from estimator_ext.checkpoints.file_errors import remove
from estimator_ext.checkpoints.input_state_file import SUFFIX, Packed, pack, step_of, unpack
from estimator_ext.checkpoints.reading import read_step
from estimator_ext.graphs.global_step import read_global_step
from estimator_ext.graphs.walks import ancestors
from estimator_ext.input.positions import (
    BatchPosition,
    IteratorPosition,
    fingerprint,
)

_log = tf.get_logger()
KINDS = (IteratorPosition.kind, BatchPosition.kind)  # values of `RunConfig.resume_data`

_UNEVEN = "a rank whose data end early ends the training of all ranks with an error (uneven_data)"
_RESUME = "a resumed training reads its data from the beginning (exact resume)"
_RANDOM = ("Random", "Multinomial", "TruncatedNormal", "ParameterizedTruncatedNormal")


@functools.cache
def _identifier(pid: int) -> str:
    """Identifies a process; a child of fork() has an identifier that differs from its parent's."""
    return secrets.token_hex(8)


@dataclass(eq=False)
class InputStates(tf.compat.v1.train.SessionRunHook):
    """Positions of the ranks of a training in their data; created after the input is built.

    It must come after all hooks that may initialize iterators.
    """

    communicator: hostopt.Communicator  # for this object alone (a `duplicate`)
    data_have_ended: Callable[[], bool]
    more: tf.Tensor  # reads a batch; False or an OutOfRangeError means that the data have ended
    # if a restarted process skips batches; None to save the states of the iterators
    batches: BatchPosition | None = None
    # on rank 0, path of the checkpoint that will be restored; None if there is none. It is found
    # before the session, as savers may save before this hook is called.
    restored: str | None = None

    def __post_init__(self) -> None:
        iterators = list(tf.compat.v1.get_collection(GLOBAL_ITERATORS))
        self._position: IteratorPosition | BatchPosition = self.batches or IteratorPosition(
            self.communicator.rank, iterators, self.more
        )
        self._pipelines = [fingerprint(iterator.op) for iterator in iterators]
        self._first_step = 0
        self._has_begun = False
        self._collected: list[bytes] = []
        self._has_resumed = False  # True if any rank resumes at a saved position
        self.starts_over = False  # True if the training should begin again, from the first batch

    def listen(self, savers: Sequence[tf.compat.v1.train.CheckpointSaverHook]) -> None:
        """Registers listeners that write the states before each checkpoint of this rank."""
        for saver in savers:
            listeners_of(saver).append(_Listener(self, saver))

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Restores the positions that belong to the restored checkpoint."""
        self._first_step = step = read_global_step(session)
        is_restored = self.restored and read_step(self.restored) == step
        self.restore(session, self.restored if is_restored else None)

    def restore(self, session: tf.compat.v1.Session, checkpoint: str | None) -> None:
        """Restores the positions of all ranks from rank 0's checkpoint, if any. Collective."""
        communicator = self.communicator
        states = []
        if communicator.rank == 0:
            states = _read(checkpoint, communicator.size) or [b""] * communicator.size
        state = communicator.scatter_bytes(states, "the states of the data")
        packed = self._unpack(state) if state else None
        has_ended = self._position.load(session, packed)
        of_ranks = communicator.all_gather(
            np.array([has_ended, packed is not None]), "whether the data had ended"
        )
        all_ended = of_ranks[:, 0].all()
        self._has_resumed = bool(of_ranks[:, 1].any() and not all_ended)
        if all_ended:  # resuming would end each training before its first step
            self._log_start_over()
        self._position.resume(session, from_start=bool(all_ended))
        self._has_begun = True

    def gather(self, session: tf.compat.v1.Session, *, has_more: bool = False) -> None:
        """Collects the states of all ranks on rank 0. Collective: all ranks must call it.

        Unless a rank has more, data that have ended are read from the beginning after a restart.
        """
        packed = None
        if has_more or not self.data_have_ended():
            packed = self._position.save(session)
        state = b""
        if packed is not None:
            state = pack({"pipelines": self._pipelines, **packed.attributes}, packed.parts)
        self._collected = self.communicator.gather_bytes(state, "the states of the data")

    def forget(self) -> None:
        """Drops the collected states, because a step follows."""
        self._collected = []

    def write(self, session: tf.compat.v1.Session, checkpoint: str) -> None:
        """Writes the collected states before a checkpoint is saved, and removes outdated files."""
        if self.communicator.size == 1 and self._has_begun:
            self.gather(session)
        if not self._collected:  # before the first step; a restored checkpoint has its states
            return
        _write(checkpoint, self._collected)
        # the input states of deleted checkpoints go
        for other in tf.io.gfile.glob(f"{checkpoint.rpartition('-')[0]}-*{SUFFIX}"):
            saved = other[: -len(SUFFIX)]
            if saved != checkpoint and not tf.io.gfile.exists(f"{saved}.index"):
                remove(other)

    def end(self, session: tf.compat.v1.Session) -> None:
        """Finds out if the data had ended at the position at which they were resumed.

        A position of batches does not show this before the next one is read. Then the training
        should begin again, from the first batch: with this position it would never make a step.
        The states of the restored checkpoint, which rank 0 names, are removed then.
        """
        has_stepped = read_global_step(session) != self._first_step
        if has_stepped or not (self._has_resumed and self.data_have_ended()):
            return
        self.starts_over = True
        self._log_start_over()
        if self.restored is not None:
            _write(self.restored, [b""] * self.communicator.size)

    def _log_start_over(self) -> None:
        rank = self.communicator.rank
        _log.info("rank %d: its data had ended, and are read from the beginning", rank)

    def _unpack(self, state: bytes) -> Packed | None:
        """The saved position; None if the pipelines or the kind of the position have changed."""
        packed, reason = unpack(state), ""
        kind = KINDS["batches" in packed.attributes]
        if packed.attributes["pipelines"] != self._pipelines:
            reason = "input_fn builds another pipeline than the one whose state was saved"
        elif kind != self._position.kind:
            reason = f"resume_data was {kind!r}, and now it is {self._position.kind!r}"
        if not reason:
            return packed
        rank = self.communicator.rank
        _log.warning("rank %d: its data are read from the beginning: %s", rank, reason)
        return None


class _Listener(tf.compat.v1.train.CheckpointSaverListener):
    def __init__(self, states: InputStates, saver: tf.compat.v1.train.CheckpointSaverHook) -> None:
        self._states = states
        self._saver = saver

    def before_save(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
        self._states.write(session, f"{save_path(self._saver)}-{global_step_value}")


def log_limits(data: Any, size: int, *, is_counted: bool) -> None:
    """Logs the limits of a training whose input_fn returns tensors."""
    if isinstance(data, tf.data.Dataset):
        return
    limits = [_UNEVEN] if size > 1 else []
    # only iterators have a state to save; batches that are counted are skipped instead
    if not is_counted and not tf.compat.v1.get_collection(GLOBAL_ITERATORS):
        limits.append(_RESUME)
    if limits:
        _log.info(
            "input_fn returned tensors, not a tf.data.Dataset: %s. Return a dataset to avoid that",
            ", and ".join(limits),
        )


def log_random_operations(train_op: Any, data: Collection[tf.Operation]) -> None:
    """Logs random operations of a model whose results differ after a restart."""
    operations = ancestors([getattr(train_op, "op", train_op)])
    names = [op.name for op in operations if op.type.startswith(_RANDOM) and op not in data]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        _log.info(
            "these random numbers differ after a restart: %s%s. Use tf.random.stateless_* with a "
            "seed computed from global_step to avoid that",
            ", ".join(names[:3]),
            more,
        )


def _write(checkpoint: str, states: Sequence[bytes]) -> None:
    attributes = {"process": _identifier(os.getpid()), "step": step_of(checkpoint)}
    input_state_file.write(checkpoint, attributes, states)


def _read(checkpoint: str | None, size: int) -> list[bytes]:
    """The saved state of each rank; [] if there are none, or they do not fit."""
    if checkpoint is None:
        return []
    packed = input_state_file.read(checkpoint)
    if packed is None:
        if step_of(checkpoint) != "0":  # saved before the first step
            _log.warning(
                "the data are read from the beginning: %s was saved without their state",
                checkpoint,
            )
        return []
    if packed.attributes["process"] == _identifier(os.getpid()):
        return []
    if not any(packed.parts):  # they had ended, or their position cannot be saved
        _log.info("the data are read from the beginning: no position was saved in %s", checkpoint)
        return []
    if len(packed.parts) != size:
        _log.warning(
            "the data are read from the beginning: %s was saved by %d ranks, and now there are %d",
            checkpoint,
            len(packed.parts),
            size,
        )
        return []
    return packed.parts
