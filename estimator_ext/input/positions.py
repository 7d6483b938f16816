"""The position of a rank in its data: the states of its iterators, or a number of batches.

tf.data saves and restores the states. A restarted process skips the number of batches that it had
read; this needs no state of an iterator, so it works for Python generators. The data must be the
same in each process then. A sample of the last batch before a checkpoint shows if they are not.
"""

from __future__ import annotations

import functools
import itertools
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext._tf_private import (
    add_control_inputs,
    deserialize_iterator,
    serialize_iterator,
)
from estimator_ext.checkpoints.input_state_file import SUFFIX, Packed
from estimator_ext.graphs.walks import ancestors, library_of, with_called
from estimator_ext.pipelines.data_order import checksum, samples_of
from hostopt.tensorflow._tf_private import call_python
from hostopt.tensorflow.background import HOST_DEVICE

_log = tf.get_logger()

MAX_BYTES = 256 << 20  # of the states of one rank; rank 0 holds those of all ranks at each save
# What tf.data does about a function that keeps a state outside of the iterator.
_IGNORE_EXTERNAL_STATE, _FAIL_ON_EXTERNAL_STATE = 1, 2
_RELEVANT = ("stateful", "checkpoint", "not yet supported")  # in the message of an error
_SKIP = "RunConfig(resume_data='skip') resumes deterministic data by reading them again"
_ROUND_S = 5.0  # of skipping, after which a rank logs and exchanges its progress
_ALLOWED = "hostopt/reads_outside_of_the_loop"


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
        # policies that may work; the first one is used
        self._policies = [_FAIL_ON_EXTERNAL_STATE, _IGNORE_EXTERNAL_STATE]
        self._reason = ""  # why there are fewer policies, until it is logged
        # known before the first save, which would wait for the generator
        if any(_reads_generator(iterator.op) for iterator in iterators):
            self._policies = []
            self._reason = f"a Python generator has no state (operation GeneratorDataset). {_SKIP}"
        self._initial: list[list[bytes]] = []
        self._loaded: list[list[bytes]] = []

    def save(self, session: tf.compat.v1.Session) -> Packed | None:
        """Returns the position, with the attribute "parts"; None if it cannot be saved."""
        parts = self._save(session)
        if not parts:
            return None
        return Packed({"parts": [*map(len, parts)]}, [*itertools.chain.from_iterable(parts)])

    def _save(self, session: tf.compat.v1.Session) -> list[list[bytes]]:
        """The parts of each iterator's state; [] if they cannot be saved. Logs once."""
        reason, self._reason = self._reason, ""
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

    def load(self, session: tf.compat.v1.Session, packed: Packed | None) -> bool:
        """Loads the result of `save`, if any; returns True if the data had ended there."""
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
    """Serializes the state of an iterator, up to the part over MAX_BYTES.

    Returns the parts, strings of shape [parts], and their total size in bytes, int64.
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
    value = 0
    for node in _nodes_of(iterator):
        value = zlib.crc32(node.op.encode(), value)
        if node.op == "Const":
            value = zlib.crc32(node.attr["value"].SerializeToString(), value)
    return value


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


# -- positions as numbers of batches ----------------------------------------------------------


class BatchPosition:
    """The number of batches that this rank has read, which it counts."""

    kind = "skip"  # value of `RunConfig.resume_data`

    def __init__(self, communicator: hostopt.Communicator) -> None:
        self._communicator = communicator  # for the input alone (a `duplicate`)
        options = communicator.transport.options
        # no rank waits for another one so long that it warns
        self._round_s = min(
            _ROUND_S, options.stall_warning_s / 2, options.collective_timeout_s / 2
        )
        self._count = 0
        self._sample: tuple[Any, ...] = ()  # of the last batch
        # scalar of bool; False, or an OutOfRangeError, means that the data have ended
        self._read: Any = None
        self._loaded: dict[str, Any] = {}

    def counted(self, batch: Any, is_new: Any) -> Any:
        """Adds counting to a batch of a graph, tensors in any structure.

        A step that uses one of them reads all. If `is_new`, a scalar of bool, is False, the batch
        is not counted.
        """
        values = tf.nest.flatten(batch, expand_composites=True)
        tensors = [value for value in values if tf.is_tensor(value)]
        with tf.device(HOST_DEVICE), tf.name_scope("batch_counter"):
            samples = samples_of(tensors)
            with tf.control_dependencies(tensors):
                (self._read,) = call_python(self._note, [is_new, *samples], [tf.bool])
            self._read.set_shape([])
            with tf.control_dependencies([self._read]):
                values = [tf.identity(each) if tf.is_tensor(each) else each for each in values]
        return tf.nest.pack_sequence_as(batch, values, expand_composites=True)

    def _note(self, is_new: Any, *sample: Any) -> list[Any]:
        if is_new:
            self._count += 1
            self._sample = sample
        return [is_new]

    def save(self, session: tf.compat.v1.Session) -> Packed:
        """Returns the position, with the attributes "batches" and "checksum"."""
        return Packed({"batches": self._count, "checksum": checksum(self._sample)}, [])

    def load(self, session: tf.compat.v1.Session, packed: Packed | None) -> bool:
        """Loads a saved position; returns False, as it does not show if the data had ended."""
        self._loaded = packed.attributes if packed is not None else {}
        return False

    def resume(self, session: tf.compat.v1.Session, *, from_start: bool) -> None:
        """Skips the batches before the loaded position.

        Collective: all ranks must call it. They exchange their progress every few seconds, so a
        rank that skips more than the others does not exceed their timeout.
        """
        rank = self._communicator.rank
        wanted = 0 if from_start else self._loaded.get("batches", 0)
        if wanted:
            _log.info("rank %d skips the %s batches that it read before", rank, f"{wanted:,}")
        else:
            _log.info("rank %d counts its batches, to skip them after a restart", rank)
        allowed = allowed_reads(session.graph)
        read, began_s = session.make_callable(self._read, [*allowed]), time.monotonic()
        while True:
            self._skip(functools.partial(read, *allowed.values()), wanted)
            left = self._communicator.all_gather(
                np.array(max(0, wanted - self._count)), "the number of batches to skip"
            )
            if not left.any():
                break
            if left[rank]:
                counts = f"{self._count:,} of {wanted:,}"
                _log.info("rank %d: skipped %s batches", rank, counts)
        if wanted:
            took_s = time.monotonic() - began_s
            _log.info("rank %d: skipped %s batches in %.1f s", rank, f"{wanted:,}", took_s)
            self._check_sample()

    def _skip(self, read: Callable[[], Any], wanted: int) -> None:
        until_s = time.monotonic() + self._round_s
        while self._count < wanted and time.monotonic() < until_s:
            try:
                has_data = read()
            except tf.errors.OutOfRangeError:
                has_data = False
            if not has_data:
                rank = self._communicator.rank
                raise hostopt.CheckpointError(
                    f"rank {rank} has {self._count} batches, wanted the {wanted} that it read "
                    "before the checkpoint: resume_data is 'skip', and input_fn returns other "
                    "data than then. Make them deterministic, or remove the checkpoint's file "
                    f"*{SUFFIX} to read the data from the beginning",
                    rank=rank,
                )

    def _check_sample(self) -> None:
        if checksum(self._sample) != self._loaded["checksum"]:
            _log.warning(
                "rank %d: the last of the skipped batches is not the one that was read before the "
                "checkpoint, so the training does not resume exactly. With resume_data='skip' "
                "input_fn must return the same data in each process: fix the seeds of generators, "
                "of shuffle and of random operations",
                self._communicator.rank,
            )


# -- reads outside of the step, which a loop of steps forbids to hooks and summaries -------------


def forbid_reads(operations: Iterable[tf.Operation], message: str) -> None:
    """Makes those operations that read a batch fail, unless `allowed_reads` is fed."""
    with tf.control_dependencies(None):
        is_allowed = tf.compat.v1.placeholder_with_default(False, [], "reads_are_allowed")
        check = tf.raw_ops.Assert(condition=is_allowed, data=[message])
    tf.compat.v1.add_to_collection(_ALLOWED, is_allowed)
    for op in operations:
        if op.type.startswith("IteratorGetNext"):
            add_control_inputs(op, [check])


def allowed_reads(graph: tf.Graph) -> dict[tf.Tensor, bool]:
    """Returns a feed_dict with which a session can read a batch outside of the step."""
    return dict.fromkeys(graph.get_collection(_ALLOWED), True)
