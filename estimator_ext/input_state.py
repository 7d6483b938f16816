"""How far each rank has read its data, saved with each checkpoint and taken up again.

Beside ``model.ckpt-100`` lies ``model.ckpt-100.input``, which rank 0 writes first: a checkpoint is
never there without it. It holds the state of each iterator of each rank, as tf.data
saves it, shuffle buffers included; rank 0 collects them, as the ranks need share no file system.

A training that starts in another process goes on where the data stood. Within one process another
`train` reads its data from the beginning, as with a stock Estimator, and so does one whose data
had ended on all ranks, or whose input_fn or number of ranks is another one.
"""

from __future__ import annotations

import itertools
import secrets
import zlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import GLOBAL_ITERATORS
from tensorflow.python.ops import gen_dataset_ops

import hostopt
from estimator_ext import input_state_file
from estimator_ext.file_errors import remove
from estimator_ext.graph import ancestors
from estimator_ext.input_state_file import SUFFIX, Packed, is_counts, pack, unpack
from estimator_ext.session_guard import SessionGuardHook
from hostopt.tensorflow.background import HOST_DEVICE

__all__: list[str] = []

_log = tf.get_logger()

_THIS_PROCESS = secrets.token_hex(8)
# What tf.data does about functions that keep a state of their own outside of the iterator.
_IGNORE, _FAIL = 1, 2
MAX_BYTES = 256 << 20  # of the states of a rank; rank 0 holds those of all at each save
_RANDOM = ("Random", "Multinomial", "TruncatedNormal", "ParameterizedTruncatedNormal")


class InputStates:
    """The iterators of a training, of all ranks; built once the input is.

    Args:
      communicator: a communicator of its own (a `duplicate`).
      guard: knows whether the data have ended.
      more: tensor of the input that tells, where it is run, whether the data go on; with an
        OutOfRangeError or with False.
    """

    def __init__(
        self, communicator: hostopt.Communicator, guard: SessionGuardHook, more: tf.Tensor
    ) -> None:
        self._communicator = communicator
        self._guard = guard
        self._more = more
        iterators = list(tf.compat.v1.get_collection(GLOBAL_ITERATORS))
        self._pipelines = [_fingerprint(iterator.op) for iterator in iterators]
        with tf.device(HOST_DEVICE), tf.name_scope("input_state"):
            self._given = tf.compat.v1.placeholder(tf.string, [None])
            parts = tf.map_fn(
                lambda part: tf.io.parse_tensor(part, tf.variant),
                self._given,
                parallel_iterations=1,
                fn_output_signature=tf.TensorSpec([], tf.variant),
            )
            self._restores = [
                gen_dataset_ops.deserialize_iterator(iterator, parts) for iterator in iterators
            ]
            self._saves = {
                policy: [_serialized(iterator, policy) for iterator in iterators]
                for policy in (_FAIL, _IGNORE)
            }
        self._has_begun = False
        self._policies = [_FAIL, _IGNORE]  # those that may work, the first of them is used
        self._gathered: list[bytes] = []

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
        parts = self._parts_for(own) if own else []
        # with the policy that does not fail: a one-shot iterator does not survive that at first
        fresh = session.run(self._saves[_IGNORE]) if parts else []
        ended = bool(parts) and self._have_ended_after(session, parts)
        all_ended = communicator.all_gather(np.array(ended), "whether the data had ended").all()
        if all_ended:  # to go on would be to end before the first step, and so for ever
            _log.info("rank %d: its data had ended, and begin anew", communicator.rank)
        if parts:
            self._restore(session, [begun for begun, _ in fresh] if all_ended else parts)
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
            facts = {"pipelines": self._pipelines, "parts": [*map(len, states)]}
            own = pack(facts, [*itertools.chain.from_iterable(states)])
        self._gathered = self._communicator.gather_bytes(own, "the states of the data")

    def forget(self) -> None:
        """Drop what was collected: a step follows."""
        self._gathered = []

    def write(self, session: tf.compat.v1.Session, checkpoint: str) -> None:
        """Write what was collected, before the checkpoint itself, and remove what is out of date.

        Args:
          session: the session of this rank.
          checkpoint: path of the checkpoint that follows.

        Raises:
          hostopt.CheckpointError: they cannot be written.
        """
        if self._communicator.size == 1 and self._has_begun:
            self.gather(session)
        if not self._gathered:  # before the first step, of a checkpoint that has its states
            return
        facts = {"process": _THIS_PROCESS, "step": _step(checkpoint)}
        input_state_file.write(checkpoint, facts, self._gathered)
        _remove_old(checkpoint)

    def _save(self, session: tf.compat.v1.Session) -> list[list[bytes]]:
        """The parts of each iterator's state; none where they cannot be saved, as is said once."""
        rank, why = self._communicator.rank, ""
        for policy in list(self._policies):
            try:
                found = session.run(self._saves[policy])
            except (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError) as error:
                why = _first_line(error)
                self._policies.remove(policy)
                continue
            if sum(int(size) for _, size in found) > MAX_BYTES:
                why = (
                    f"their state takes more than {MAX_BYTES >> 20} MiB. Shuffle names of files "
                    "or numbers of examples, and cache in a file"
                )
                self._policies.clear()
                break
            if why:
                _log.info(
                    "rank %d: after a restart its data go on where they stood, but not what a "
                    "function of input_fn keeps itself, such as random numbers: %s",
                    rank,
                    why,
                )
            return [list(parts) for parts, _ in found]
        if why:
            _log.warning(
                "rank %d: its data cannot be saved with the checkpoints, and begin anew after a "
                "restart: %s",
                rank,
                why,
            )
        return []

    def _parts_for(self, own: bytes) -> list[list[bytes]]:
        """The parts that were saved for each iterator; none where they are of other data."""
        facts, parts = unpack(own)
        if facts["pipelines"] != self._pipelines:
            _log.warning(
                "rank %d: its data begin anew: input_fn makes another pipeline than the one whose "
                "state was saved",
                self._communicator.rank,
            )
            return []
        left = iter(parts)
        return [[*itertools.islice(left, count)] for count in facts["parts"]]

    def _have_ended_after(self, session: tf.compat.v1.Session, states: list[list[bytes]]) -> bool:
        """Restore, and read on to see whether something follows."""
        self._restore(session, states)
        try:
            return not session.run(self._more)
        except tf.errors.OutOfRangeError:
            return True

    def _restore(self, session: tf.compat.v1.Session, states: list[list[bytes]]) -> None:
        for restore, parts in zip(self._restores, states):
            try:
                session.run(restore, {self._given: parts})
            except tf.errors.OpError as error:
                raise hostopt.CheckpointError(
                    f"rank {self._communicator.rank} cannot go on with the data where the "
                    f"checkpoint left them: {_first_line(error)}. Remove the checkpoint's file "
                    f"*{SUFFIX} to have the data begin anew, or go on with the TensorFlow that "
                    "saved it",
                    rank=self._communicator.rank,
                ) from error


class InputStateHook(tf.compat.v1.train.SessionRunHook):
    """Takes up the data where they stood; after all hooks that may initialise the iterators.

    Args:
      states: those of the training.
      newest: path of the checkpoint that will be restored, on rank 0, if there is one; found
        before the session, as savers may save once more before this hook's turn.
    """

    def __init__(self, states: InputStates, newest: str | None) -> None:
        self._states = states
        self._newest = newest

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Restore the iterators.

        Args:
          session: the session of this rank.
          coord: not used.
        """
        del coord
        step = int(session.run(tf.compat.v1.train.get_global_step()))
        is_restored = (
            self._newest and int(tf.train.load_variable(self._newest, "global_step")) == step
        )
        self._states.begin(session, self._newest if is_restored else None)


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
    operations = ancestors([getattr(train_op, "op", train_op)])
    names = [op.name for op in operations if op.type.startswith(_RANDOM) and op not in data]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        _log.info(
            "after a restart these random numbers are others than without: %s%s. With "
            "tf.random.stateless_* and a seed made of global_step they are the same",
            ", ".join(names[:3]),
            more,
        )


def _load(checkpoint: str) -> Packed | None:
    """The states beside a checkpoint, one for each rank, where there are some."""
    return input_state_file.read(checkpoint, lambda found: _is_of(checkpoint, found))


def _is_of(checkpoint: str, found: Packed) -> bool:
    """Whether the states that a file holds can be those of a checkpoint."""
    facts, states = found
    return (
        facts.keys() == {"process", "step"}
        and facts["step"] == _step(checkpoint)
        and bool(states)
        and all(not state or _is_state(unpack(state)) for state in states)
    )


def _is_state(found: Packed) -> bool:
    """Whether it is the state of one rank's iterators."""
    facts, parts = found
    return (
        facts.keys() == {"pipelines", "parts"}
        and is_counts(facts["pipelines"])
        and is_counts(facts["parts"])
        and len(facts["parts"]) == len(facts["pipelines"])
        and sum(facts["parts"]) == len(parts)
    )


def _step(checkpoint: str) -> str:
    """The step that a checkpoint's name ends with, whatever it is called otherwise."""
    return checkpoint.rpartition("-")[2]


def _read(checkpoint: str | None, size: int) -> list[bytes]:
    """The states that were saved with a checkpoint, one for each rank; none where none fit."""
    if checkpoint is None:
        return []
    found = _load(checkpoint)
    if found is None:
        if _step(checkpoint) != "0":  # which is saved before the first step
            _log.warning("the data begin anew: %s was saved without their state", checkpoint)
        return []
    if found.facts["process"] == _THIS_PROCESS:
        return []
    if len(found.parts) != size:
        _log.warning(
            "the data begin anew: %s was saved by %d ranks, and now there are %d",
            checkpoint,
            len(found.parts),
            size,
        )
        return []
    return found.parts


def _remove_old(checkpoint: str) -> None:
    """Remove the states of checkpoints that are there no more."""
    for other in tf.io.gfile.glob(f"{checkpoint.rpartition('-')[0]}-*{SUFFIX}"):
        saved = other[: -len(SUFFIX)]
        if saved != checkpoint and not tf.io.gfile.exists(f"{saved}.index"):
            remove(other)


def _serialized(iterator: tf.Tensor, policy: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The parts of an iterator's state, up to the one that is too much, and their bytes."""
    state = gen_dataset_ops.serialize_iterator(iterator, policy)

    def add(
        index: tf.Tensor, size: tf.Tensor, parts: tf.TensorArray
    ) -> tuple[tf.Tensor, tf.Tensor, tf.TensorArray]:
        part = tf.io.serialize_tensor(state[index])
        size += tf.cast(tf.strings.length(part), tf.int64)
        return index + 1, size, parts.write(index, part)

    empty = tf.TensorArray(tf.string, tf.size(state), element_shape=[])
    count, size, parts = tf.while_loop(
        lambda index, size, _: tf.logical_and(index < tf.size(state), size <= MAX_BYTES),
        add,
        (0, tf.constant(0, tf.int64), empty),
        parallel_iterations=1,
    )
    return parts.gather(tf.range(count)), size


def _fingerprint(iterator: tf.Operation) -> int:
    """Checksum of the pipeline behind an iterator: kinds of datasets and constants."""
    makers = [op for tensor in iterator.outputs for op in tensor.consumers()]
    nodes = [
        op.node_def
        for maker in makers
        if maker.type == "MakeIterator"
        for op in ancestors([maker])
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
