"""The position of a rank in its data as the states of its iterators, which tf.data restores."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_private import deserialize_iterator, serialize_iterator
from estimator_ext.checkpoints.input_state_file import SUFFIX, Packed
from estimator_ext.graphs.walks import ancestors, library_of, with_called
from estimator_ext.input.reads import allowed_reads
from hostopt.tensorflow.background import HOST_DEVICE

_log = tf.get_logger()

MAX_BYTES = 256 << 20  # of the states of one rank; rank 0 holds those of all ranks at each save
# What tf.data does about a function that keeps a state outside of the iterator.
_IGNORE_EXTERNAL_STATE, _FAIL_ON_EXTERNAL_STATE = 1, 2
_RELEVANT = ("stateful", "checkpoint", "not yet supported")  # in the message of an error
_SKIP = "RunConfig(resume_data='skip') resumes deterministic data by reading them again"


class IteratorPosition:
    """The states of the iterators of a rank; see `InputStates` for `more`."""

    kind = "state"  # value of `RunConfig.resume_data`

    def __init__(self, rank: int, iterators: Sequence[tf.Tensor], more: tf.Tensor) -> None:
        self._rank = rank
        self._more = more
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
                policy: [_serialize(iterator, policy) for iterator in iterators]
                for policy in (_FAIL_ON_EXTERNAL_STATE, _IGNORE_EXTERNAL_STATE)
            }
        # known before the first save, which would wait for the generator
        self._has_generator = any(_reads_generator(iterator.op) for iterator in iterators)
        # policies that may work; the first one is used
        self._policies = [_FAIL_ON_EXTERNAL_STATE, _IGNORE_EXTERNAL_STATE]
        self._initial: list[list[bytes]] = []
        self._loaded: list[list[bytes]] = []

    # -- saving ----------------------------------------------------------------------------

    def save(self, session: tf.compat.v1.Session) -> Packed | None:
        """Returns the position, with the attribute "parts"; None if it cannot be saved."""
        parts = self._save(session)
        if not parts:
            return None
        return Packed({"parts": [*map(len, parts)]}, [*itertools.chain.from_iterable(parts)])

    def _save(self, session: tf.compat.v1.Session) -> list[list[bytes]]:
        """The parts of each iterator's state; [] if they cannot be saved. Logs once."""
        reason = ""
        if self._has_generator:
            reason = f"a Python generator has no state (operation GeneratorDataset). {_SKIP}"
            self._policies.clear()
            self._has_generator = False
        for policy in list(self._policies):
            try:
                states = session.run(self._saves[policy])
            except (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError) as error:
                reason = f"{_first_line(error)}. {_SKIP}"
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
                    self._rank,
                    reason,
                )
            return [list(parts) for parts, _ in states]
        if reason:
            _log.warning(
                "rank %d: its data cannot be saved with the checkpoints, and are read from the "
                "beginning after a restart: %s",
                self._rank,
                reason,
            )
        return []

    # -- resuming --------------------------------------------------------------------------

    def load(self, session: tf.compat.v1.Session, packed: Packed | None) -> bool:
        """Loads a saved position; returns True if the data had ended there.

        Args:
          packed: result of `save`; None to read the data from the beginning.
        """
        if packed is None:
            return False
        remaining = iter(packed.parts)
        self._loaded = [
            [*itertools.islice(remaining, count)] for count in packed.attributes["parts"]
        ]
        # saved for the case that all data had ended; ignoring external state, as the other policy
        # breaks a one-shot iterator that has not been read yet
        initial = session.run(self._saves[_IGNORE_EXTERNAL_STATE])
        self._initial = [list(parts) for parts, _ in initial]
        self._restore(session, self._loaded)
        try:
            return not session.run(self._more, allowed_reads(session.graph))
        except tf.errors.OutOfRangeError:
            return True

    def resume(self, session: tf.compat.v1.Session, *, from_start: bool) -> None:
        """Continues reading at the loaded position, or from the start of the data."""
        self._restore(session, self._initial if from_start else self._loaded)

    def _restore(self, session: tf.compat.v1.Session, states: list[list[bytes]]) -> None:
        for restore, parts in zip(self._restores, states):
            try:
                session.run(restore, {self._parts: parts})
            except tf.errors.OpError as error:
                raise hostopt.CheckpointError(
                    f"rank {self._rank} cannot resume its data at the position of the "
                    f"checkpoint: {_first_line(error)}. Remove the checkpoint's file *{SUFFIX} to "
                    "read the data from the beginning, or resume with the TensorFlow that saved "
                    "it",
                    rank=self._rank,
                ) from error


def _first_line(error: tf.errors.OpError) -> str:
    lines = [line for line in error.message.splitlines() if line.strip()]
    relevant = [line for line in lines if any(each in line for each in _RELEVANT)]
    return str((relevant or lines or ["unknown"])[0]).strip()


def _serialize(iterator: tf.Tensor, policy: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Builds operations that serialize the state of an iterator, up to the part over MAX_BYTES.

    Returns:
      Tensors: the parts of the state, strings of shape [parts]; their total size in bytes, int64.
    """
    state = serialize_iterator(iterator, policy)

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


def fingerprint(iterator: tf.Operation) -> int:
    """Returns a CRC-32 of the pipeline of an iterator: its kinds of datasets and constants."""
    checksum = 0
    for node in _nodes_of(iterator):
        checksum = zlib.crc32(node.op.encode(), checksum)
        if node.op == "Const":
            checksum = zlib.crc32(node.attr["value"].SerializeToString(), checksum)
    return checksum


def _reads_generator(iterator: tf.Operation) -> bool:
    """Returns True if the pipeline of an iterator reads a Python generator, which has no state."""
    library = library_of(iterator.graph)
    called = with_called(_nodes_of(iterator), library)
    return any(node.op == "GeneratorDataset" for nodes in called for node in nodes)


def _nodes_of(iterator: tf.Operation) -> list[Any]:
    makers = [op for tensor in iterator.outputs for op in tensor.consumers()]
    nodes = [
        op.node_def
        for maker in makers
        if maker.type == "MakeIterator"
        for op in ancestors([maker])
    ]
    if iterator.type == "OneShotIterator":
        nodes += library_of(iterator.graph)[iterator.get_attr("dataset_factory").name]
    return nodes
