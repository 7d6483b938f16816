"""How far each rank has read its data, saved with each checkpoint and taken up again.

Beside ``model.ckpt-100`` lies ``model.ckpt-100.input``, a zip file that rank 0 writes first: a
checkpoint is never there without it. It holds the state of each iterator of each rank, as tf.data
saves it, shuffle buffers included; rank 0 collects them, as the ranks need share no file system.

A training that starts in another process goes on where the data stood. Within one process another
`train` reads its data from the beginning, as with a stock Estimator, and so does one whose data
had ended, or whose input_fn or number of ranks is another one.
"""

from __future__ import annotations

import contextlib
import io
import json
import secrets
import zipfile
import zlib
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import GLOBAL_ITERATORS
from tensorflow.python.ops import gen_dataset_ops

import hostopt
from estimator_ext.fingerprint import ancestors
from estimator_ext.session_guard import SessionGuardHook
from hostopt.tensorflow.ops import HOST_DEVICE

__all__: list[str] = []

_log = tf.get_logger()

_SUFFIX = ".input"
_FACTS = "facts.json"
_THIS_PROCESS = secrets.token_hex(8)
# What tf.data does about functions that keep a state of their own outside of the iterator.
_IGNORE, _FAIL = 1, 2
_RANDOM = ("Random", "Multinomial", "TruncatedNormal", "ParameterizedTruncatedNormal")


class InputStates:
    """The iterators of a training, of all ranks; built once the input is.

    Args:
      communicator: a communicator of its own (a `duplicate`).
      guard: knows whether the data have ended.
    """

    def __init__(self, communicator: hostopt.Communicator, guard: SessionGuardHook) -> None:
        self._communicator = communicator
        self._guard = guard
        self._iterators = list(tf.compat.v1.get_collection(GLOBAL_ITERATORS))
        self._pipelines = [_fingerprint(iterator.op) for iterator in self._iterators]
        with tf.device(HOST_DEVICE), tf.name_scope("input_state"):
            self._given = tf.compat.v1.placeholder(tf.string, [])
            state = tf.io.parse_tensor(self._given, tf.variant)
            self._restores = [
                gen_dataset_ops.deserialize_iterator(iterator, state)
                for iterator in self._iterators
            ]
            self._saves = {
                policy: [
                    tf.io.serialize_tensor(gen_dataset_ops.serialize_iterator(iterator, policy))
                    for iterator in self._iterators
                ]
                for policy in (_FAIL, _IGNORE)
            }
        self._has_begun = False
        self._policies = [_FAIL, _IGNORE]  # those that may work, the first of them is used
        self._gathered: list[bytes] = []
        facts = {"number of iterators": str(len(self._iterators))}
        communicator.check_same(facts, "the inputs")

    def listen(self, savers: Sequence[tf.compat.v1.train.CheckpointSaverHook]) -> None:
        """Have the states written before each checkpoint of this rank.

        Args:
          savers: hooks that save.
        """
        for saver in savers:
            saver._listeners.append(_Listener(self, saver))

    def begin(self, session: tf.compat.v1.Session, checkpoint: str | None) -> None:
        """Take up the data where a checkpoint left them; all ranks call this together.

        Args:
          session: the session of this rank, whose iterators are initialised.
          checkpoint: on rank 0 path of the checkpoint that was restored, if one was.

        Raises:
          hostopt.CheckpointError: the states of the checkpoint cannot be read.
          hostopt.HostOptError: a rank failed, left or timed out.
        """
        communicator = self._communicator
        states = []
        if communicator.rank == 0:
            states = _read(checkpoint, communicator.size) or [b""] * communicator.size
        own = communicator.scatter_bytes(states, "the states of the data")
        if own:
            self._restore(session, own)
        self._has_begun = True

    def gather(self, session: tf.compat.v1.Session) -> None:
        """Collect the states for a checkpoint; all ranks call this together.

        Args:
          session: the session of this rank.

        Raises:
          hostopt.HostOptError: a rank failed, left or timed out.
        """
        own = b""
        states = [] if self._guard.data_have_ended else self._save(session)
        if states:
            own = _pack({str(i): state for i, state in enumerate(states)}, self._pipelines)
        self._gathered = self._communicator.gather_bytes(own, "the states of the data")

    def forget(self) -> None:
        """Drop what was collected: a step follows."""
        self._gathered = []

    def write(self, session: tf.compat.v1.Session, checkpoint: str) -> None:
        """Write what was collected, before the checkpoint itself, and remove what is out of date.

        Args:
          session: the session of this rank.
          checkpoint: path of the checkpoint that follows.
        """
        if self._communicator.size == 1 and self._has_begun:
            self.gather(session)
        if not self._gathered:  # before the first step, of a checkpoint that has its states
            return
        entries = {f"rank {rank}": state for rank, state in enumerate(self._gathered)}
        data = _pack(entries, {"process": _THIS_PROCESS, "size": self._communicator.size})
        path = f"{checkpoint}{_SUFFIX}"
        try:
            with tf.io.gfile.GFile(f"{path}.tmp", "wb") as file:
                file.write(data)
            tf.io.gfile.rename(f"{path}.tmp", path, overwrite=True)
        except tf.errors.OpError:
            _remove(f"{path}.tmp")  # a full disk must not stay so for it
            raise
        _remove_old(path)

    def _save(self, session: tf.compat.v1.Session) -> list[bytes]:
        """The state of each iterator; none where they cannot be saved, as is said once."""
        rank, why = self._communicator.rank, ""
        for policy in list(self._policies):
            try:
                states = session.run(self._saves[policy])
            except tf.errors.OpError as error:
                why = _first_line(error)
                self._policies.remove(policy)
                continue
            if why:
                _log.info(
                    "rank %d: after a restart its data go on where they stood, but not what a "
                    "function of input_fn keeps itself, such as random numbers: %s",
                    rank,
                    why,
                )
            return list(states)
        if why:
            _log.warning(
                "rank %d: its data cannot be saved with the checkpoints, and begin anew after a "
                "restart: %s",
                rank,
                why,
            )
        return []

    def _restore(self, session: tf.compat.v1.Session, own: bytes) -> None:
        states, pipelines = _unpack(own)
        if pipelines != self._pipelines:
            _log.warning(
                "rank %d: its data begin anew: input_fn makes another pipeline than the one whose "
                "state was saved",
                self._communicator.rank,
            )
            return
        for index, restore in enumerate(self._restores):
            try:
                session.run(restore, {self._given: states[str(index)]})
            except tf.errors.OpError as error:
                raise hostopt.CheckpointError(
                    f"rank {self._communicator.rank} cannot go on with the data where the "
                    f"checkpoint left them: {_first_line(error)}. Remove the checkpoint's file "
                    f"*{_SUFFIX} to have the data begin anew, or go on with the TensorFlow that "
                    "saved it",
                    rank=self._communicator.rank,
                ) from error


class InputStateHook(tf.compat.v1.train.SessionRunHook):
    """Takes up the data where they stood; after the hooks that initialise the iterators.

    Args:
      states: those of the training.
      model_dir: where checkpoints are; None on ranks that have none.
    """

    def __init__(self, states: InputStates, model_dir: str | None) -> None:
        self._states = states
        self._model_dir = model_dir

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Restore the iterators.

        Args:
          session: the session of this rank.
          coord: not used.
        """
        del coord
        self._states.begin(session, self._restored_checkpoint(session))

    def _restored_checkpoint(self, session: tf.compat.v1.Session) -> str | None:
        path = tf.train.latest_checkpoint(self._model_dir) if self._model_dir else None
        if path is None:
            return None
        step = int(session.run(tf.compat.v1.train.get_global_step()))
        return path if int(tf.train.load_variable(path, "global_step")) == step else None


class _Listener(tf.compat.v1.train.CheckpointSaverListener):
    """Writes the states of the data when a saver is about to save."""

    def __init__(self, states: InputStates, saver: tf.compat.v1.train.CheckpointSaverHook) -> None:
        self._states = states
        self._saver = saver

    def before_save(self, session: tf.compat.v1.Session, global_step_value: int) -> None:
        """Write them."""
        self._states.write(session, f"{self._saver._save_path}-{global_step_value}")


def check(checkpoint: str) -> None:
    """Read the states of the data that belong to a checkpoint, where there are some.

    Args:
      checkpoint: its path.

    Raises:
      hostopt.CheckpointError: the file is damaged.
    """
    _load(checkpoint)


def name_random_operations(train_op: Any, data: Collection[tf.Operation]) -> None:
    """Say which random numbers of a model differ after a restart.

    Args:
      train_op: operation or tensor of a step.
      data: operations of the input.
    """
    operations = ancestors(getattr(train_op, "op", train_op))
    names = [op.name for op in operations if op.type.startswith(_RANDOM) and op not in data]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        _log.info(
            "after a restart these random numbers are others than without: %s%s. With "
            "tf.random.stateless_* and a seed made of global_step they are the same",
            ", ".join(names[:3]),
            more,
        )


def _load(checkpoint: str) -> tuple[dict[str, bytes], Any]:
    """The file beside a checkpoint: entries and facts; nothing where there is none."""
    path = f"{checkpoint}{_SUFFIX}"
    if not tf.io.gfile.exists(path):
        return {}, {}
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            return _unpack(file.read())
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError) as error:
        raise hostopt.CheckpointError(
            f"{path}, which says how far the data of {checkpoint} were read, is damaged: {error}. "
            "Remove it to have the data begin anew, or go on from another checkpoint"
        ) from error


def _read(checkpoint: str | None, size: int) -> list[bytes]:
    """The states that were saved with a checkpoint, one for each rank; none where none fit."""
    entries, facts = _load(checkpoint) if checkpoint else ({}, {})
    if not facts or facts["process"] == _THIS_PROCESS:
        return []
    if facts["size"] != size:
        _log.warning(
            "the data begin anew: %s was saved by %d ranks, and now there are %d",
            checkpoint,
            facts["size"],
            size,
        )
        return []
    return [entries[f"rank {rank}"] for rank in range(size)]


def _remove_old(path: str) -> None:
    """Remove the states of checkpoints that are there no more."""
    for other in tf.io.gfile.glob(f"{path.rpartition('-')[0]}-*{_SUFFIX}"):
        if other != path and not tf.io.gfile.exists(f"{other[: -len(_SUFFIX)]}.index"):
            _remove(other)


def _remove(path: str) -> None:
    with contextlib.suppress(tf.errors.NotFoundError):
        tf.io.gfile.remove(path)


def _pack(entries: dict[str, bytes], facts: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(_FACTS, json.dumps(facts))
        for name, data in entries.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def _unpack(data: bytes) -> tuple[dict[str, bytes], Any]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:  # each entry has a CRC, which is checked
        entries = {name: archive.read(name) for name in archive.namelist()}
    return entries, json.loads(entries.pop(_FACTS))


def _fingerprint(iterator: tf.Operation) -> int:
    """Checksum of the pipeline behind an iterator: kinds of datasets and constants."""
    makers = [op for tensor in iterator.outputs for op in tensor.consumers()]
    nodes = [
        op.node_def for maker in makers if maker.type == "MakeIterator" for op in ancestors(maker)
    ]
    if iterator.type == "OneShotIterator":
        name = iterator.get_attr("dataset_factory").name
        library = iterator.graph.as_graph_def().library.function
        nodes += next(function.node_def for function in library if function.signature.name == name)
    checksum = 0
    for node in nodes:
        checksum = zlib.crc32(node.op.encode(), checksum)
        if node.op == "Const":
            checksum = zlib.crc32(node.attr["value"].SerializeToString(), checksum)
    return checksum


def _first_line(error: tf.errors.OpError) -> str:
    lines = [line for line in error.message.splitlines() if line.strip()]
    told = [line for line in lines if "stateful" in line or "checkpoint" in line]
    return (told or lines or ["unknown"])[0].strip()
