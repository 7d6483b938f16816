"""Input state: the position of each rank in its data, saved with checkpoints and restored.

The state of ``model.ckpt-100`` is ``model.ckpt-100.input``. Rank 0 writes it before the
checkpoint, so that no checkpoint lacks it. It holds the state of each iterator of each rank, as
tf.data saves it, including shuffle buffers. Rank 0 collects the states, as the ranks need not
share a file system.

A training that starts in another process resumes its data at that position. It reads the data
from the beginning, as the stock Estimator does, if it runs in the same process, if the data had
ended on all ranks, or if its input_fn or number of ranks has changed.
"""

from __future__ import annotations

import functools
import itertools
import os
import secrets
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext import input_state_file
from estimator_ext._tf_private import GLOBAL_ITERATORS, deserialize_iterator
from estimator_ext.file_errors import remove
from estimator_ext.graph import ancestors
from estimator_ext.input_state_file import SUFFIX, pack, step_of, unpack
from estimator_ext.iterators import (
    FAIL_ON_EXTERNAL_STATE,
    IGNORE_EXTERNAL_STATE,
    fingerprint,
    serialize,
)
from estimator_ext.session_guard import SessionGuardHook
from hostopt.tensorflow.background import HOST_DEVICE

__all__: list[str] = []

_log = tf.get_logger()

MAX_BYTES = 256 << 20  # of the states of one rank; rank 0 holds those of all ranks at each save
_RELEVANT = ("stateful", "checkpoint", "not yet supported")  # in the message of an error
_RANDOM = ("Random", "Multinomial", "TruncatedNormal", "ParameterizedTruncatedNormal")


@functools.cache
def _identifier(pid: int) -> str:
    """Identifies a process; a child of fork() has an identifier that differs from its parent's."""
    return secrets.token_hex(8)


class InputStates:
    """States of the iterators of a training, on all ranks; created after the input is built.

    Args:
      communicator: communicator for this object alone (a `duplicate`).
      guard: hook that knows if the data have ended.
      more: tensor of the input that reads a batch; False or an OutOfRangeError means that the
        data have ended.
    """

    def __init__(
        self, communicator: hostopt.Communicator, guard: SessionGuardHook, more: tf.Tensor
    ) -> None:
        self._communicator = communicator
        self._guard = guard
        self._more = more
        iterators = list(tf.compat.v1.get_collection(GLOBAL_ITERATORS))
        self._pipelines = [fingerprint(iterator.op) for iterator in iterators]
        with tf.device(HOST_DEVICE), tf.name_scope("input_state"):
            self._parts = tf.compat.v1.placeholder(tf.string, [None])
            parts = tf.map_fn(
                lambda part: tf.io.parse_tensor(part, tf.variant),
                self._parts,
                parallel_iterations=1,
                fn_output_signature=tf.TensorSpec([], tf.variant),
            )
            self._restores = [deserialize_iterator(iterator, parts) for iterator in iterators]
            self._saves = {
                policy: [serialize(iterator, policy, MAX_BYTES) for iterator in iterators]
                for policy in (FAIL_ON_EXTERNAL_STATE, IGNORE_EXTERNAL_STATE)
            }
        self._has_begun = False
        # policies that may work; the first one is used
        self._policies = [FAIL_ON_EXTERNAL_STATE, IGNORE_EXTERNAL_STATE]
        self._collected: list[bytes] = []

    def listen(self, savers: Sequence[tf.compat.v1.train.CheckpointSaverHook]) -> None:
        """Registers listeners that write the states before each checkpoint of this rank.

        Args:
          savers: hooks that save.
        """
        for saver in savers:
            saver._listeners.append(_Listener(self, saver))

    def begin(self, session: tf.compat.v1.Session, checkpoint: str | None) -> None:
        """Restores the iterators of all ranks. Collective: all ranks must call it.

        Args:
          session: session of this rank, whose iterators are initialized.
          checkpoint: on rank 0, path of the restored checkpoint; None if there is none.

        Raises:
          hostopt.CheckpointError: the states of the checkpoint cannot be restored.
        """
        communicator = self._communicator
        states = []
        if communicator.rank == 0:
            states = _read(checkpoint, communicator.size) or [b""] * communicator.size
        state = communicator.scatter_bytes(states, "the states of the data")
        parts = self._unpack(state) if state else []
        # saved for the case that all data had ended; ignoring external state, as the other policy
        # breaks a one-shot iterator that has not been read yet
        initial = session.run(self._saves[IGNORE_EXTERNAL_STATE]) if parts else []
        ended = bool(parts) and self._have_ended_after(session, parts)
        all_ended = communicator.all_gather(np.array(ended), "whether the data had ended").all()
        if all_ended:  # resuming would end each training before its first step
            _log.info(
                "rank %d: its data had ended, and are read from the beginning", communicator.rank
            )
        if parts:
            self._restore(session, [each for each, _ in initial] if all_ended else parts)
        self._has_begun = True

    def gather(self, session: tf.compat.v1.Session, *, has_more: bool = False) -> None:
        """Collects the states of all ranks on rank 0. Collective: all ranks must call it.

        Args:
          session: session of this rank.
          has_more: True if a rank has data left. Otherwise data that have ended are read from the
            beginning after a restart.
        """
        state = b""
        parts = self._save(session) if has_more or not self._guard.data_have_ended else []
        if parts:
            attributes = {"pipelines": self._pipelines, "parts": [*map(len, parts)]}
            state = pack(attributes, [*itertools.chain.from_iterable(parts)])
        self._collected = self._communicator.gather_bytes(state, "the states of the data")

    def forget(self) -> None:
        """Drops the collected states, because a step follows."""
        self._collected = []

    def write(self, session: tf.compat.v1.Session, checkpoint: str) -> None:
        """Writes the collected states before a checkpoint is saved, and removes outdated files.

        Args:
          session: session of this rank.
          checkpoint: path of the checkpoint that is saved next.

        Raises:
          hostopt.CheckpointError: the states cannot be written.
        """
        if self._communicator.size == 1 and self._has_begun:
            self.gather(session)
        if not self._collected:  # before the first step; a restored checkpoint has its states
            return
        attributes = {"process": _identifier(os.getpid()), "step": step_of(checkpoint)}
        input_state_file.write(checkpoint, attributes, self._collected)
        _remove_old(checkpoint)

    def _save(self, session: tf.compat.v1.Session) -> list[list[bytes]]:
        """The parts of each iterator's state; [] if they cannot be saved. Logs once."""
        rank, reason = self._communicator.rank, ""
        for policy in list(self._policies):
            try:
                states = session.run(self._saves[policy])
            except (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError) as error:
                reason = _first_line(error)
                self._policies.remove(policy)
                continue
            if sum(int(size) for _, size in states) > MAX_BYTES:
                reason = (
                    f"their state takes more than {MAX_BYTES >> 20} MiB. Shuffle file names or "
                    "example numbers, and cache in a file"
                )
                self._policies.clear()
                break
            if reason:
                _log.info(
                    "rank %d: after a restart its data resume at the saved position, without the "
                    "state that a function of input_fn keeps, such as random numbers: %s",
                    rank,
                    reason,
                )
            return [list(parts) for parts, _ in states]
        if reason:
            _log.warning(
                "rank %d: its data cannot be saved with the checkpoints, and are read from the "
                "beginning after a restart: %s",
                rank,
                reason,
            )
        return []

    def _unpack(self, state: bytes) -> list[list[bytes]]:
        """The saved parts of each iterator's state; [] if the pipelines have changed."""
        attributes, parts = unpack(state)
        if attributes["pipelines"] != self._pipelines:
            _log.warning(
                "rank %d: its data are read from the beginning: input_fn builds another pipeline "
                "than the one whose state was saved",
                self._communicator.rank,
            )
            return []
        remaining = iter(parts)
        return [[*itertools.islice(remaining, count)] for count in attributes["parts"]]

    def _have_ended_after(self, session: tf.compat.v1.Session, states: list[list[bytes]]) -> bool:
        """Restores the iterators and reads a batch; returns True if there is none."""
        self._restore(session, states)
        try:
            return not session.run(self._more)
        except tf.errors.OutOfRangeError:
            return True

    def _restore(self, session: tf.compat.v1.Session, states: list[list[bytes]]) -> None:
        for restore, parts in zip(self._restores, states):
            try:
                session.run(restore, {self._parts: parts})
            except tf.errors.OpError as error:
                raise hostopt.CheckpointError(
                    f"rank {self._communicator.rank} cannot resume its data at the position of "
                    f"the checkpoint: {_first_line(error)}. Remove the checkpoint's file "
                    f"*{SUFFIX} to read the data from the beginning, or resume with the "
                    "TensorFlow that saved it",
                    rank=self._communicator.rank,
                ) from error


class InputStateHook(tf.compat.v1.train.SessionRunHook):
    """Restores the input state; it must come after all hooks that may initialize iterators.

    Args:
      states: states of the training.
      newest: on rank 0, path of the checkpoint that will be restored; None if there is none. It
        is found before the session, as savers may save before this hook is called.
    """

    def __init__(self, states: InputStates, newest: str | None) -> None:
        self._states = states
        self._newest = newest

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Restores the iterators."""
        del coord
        step = int(session.run(tf.compat.v1.train.get_global_step()))
        is_restored = (
            self._newest and int(tf.train.load_variable(self._newest, "global_step")) == step
        )
        self._states.begin(session, self._newest if is_restored else None)


class _Listener(tf.compat.v1.train.CheckpointSaverListener):
    """Writes the input state when a saver is about to save."""

    def __init__(self, states: InputStates, saver: tf.compat.v1.train.CheckpointSaverHook) -> None:
        self._states = states
        self._saver = saver

    def before_save(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
        """Writes the states."""
        self._states.write(session, f"{self._saver._save_path}-{global_step_value}")


def log_random_operations(train_op: Any, data: Collection[tf.Operation]) -> None:
    """Logs random operations of a model whose results differ after a restart.

    Args:
      train_op: operation or tensor of a step.
      data: operations of the input.
    """
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


def _remove_old(checkpoint: str) -> None:
    """Removes the input states of deleted checkpoints."""
    for other in tf.io.gfile.glob(f"{checkpoint.rpartition('-')[0]}-*{SUFFIX}"):
        saved = other[: -len(SUFFIX)]
        if saved != checkpoint and not tf.io.gfile.exists(f"{saved}.index"):
            remove(other)


def _first_line(error: tf.errors.OpError) -> str:
    lines = [line for line in error.message.splitlines() if line.strip()]
    relevant = [line for line in lines if any(each in line for each in _RELEVANT)]
    return (relevant or lines or ["unknown"])[0].strip()
