"""The position of a rank in its data as a number of batches, which a restarted process skips.

This needs no state of an iterator, so it works for Python generators. The data must be the same
in each process. A sample of the last batch before a checkpoint shows if they are not.
"""

from __future__ import annotations

import time
from typing import Any, Callable

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext.checkpoints.input_state_file import SUFFIX, Packed
from estimator_ext.input.reads import allowed_reads
from estimator_ext.pipelines.samples import checksum, samples_of
from hostopt.tensorflow._tf_private import call_python
from hostopt.tensorflow.background import HOST_DEVICE

_log = tf.get_logger()

_ROUND_S = 5.0  # of skipping, after which a rank logs and exchanges its progress


class BatchCounter:
    """Counts the batches that this rank reads.

    Attributes:
      count: number of batches.
      read: scalar of bool that reads and counts a batch; False, or an OutOfRangeError, means that
        the data have ended.
    """

    def __init__(self) -> None:
        self.count = 0
        self.read: Any = None
        self._sample: tuple[Any, ...] = ()

    def counted(self, batch: Any, is_new: Any = True) -> Any:
        """Adds counting to the input of a graph.

        Args:
          batch: tensors in any structure; a step reads all of them if it uses one.
          is_new: scalar of bool; False for a batch that is not counted.
        """
        values = tf.nest.flatten(batch, expand_composites=True)
        tensors = [value for value in values if tf.is_tensor(value)]
        with tf.device(HOST_DEVICE), tf.name_scope("batch_counter"):
            samples = samples_of(tensors)
            with tf.control_dependencies(tensors):
                (self.read,) = call_python(self._note, [is_new, *samples], [tf.bool])
            self.read.set_shape([])
            with tf.control_dependencies([self.read]):
                values = [tf.identity(each) if tf.is_tensor(each) else each for each in values]
        return tf.nest.pack_sequence_as(batch, values, expand_composites=True)

    def _note(self, is_new: Any, *sample: Any) -> list[Any]:
        if is_new:
            self.count += 1
            self._sample = sample
        return [is_new]

    def checksum(self) -> int:
        """Returns a CRC-32 of the beginning of the last batch; 0 if there is none."""
        return checksum(self._sample)


class BatchPosition:
    """The number of batches that a rank has read."""

    kind = "skip"  # value of `RunConfig.resume_data`

    def __init__(self, communicator: hostopt.Communicator, counter: BatchCounter) -> None:
        self._communicator = communicator
        self._counter = counter
        options = communicator.transport.options
        # no rank waits for another one so long that it warns
        self._round_s = min(
            _ROUND_S, options.stall_warning_s / 2, options.collective_timeout_s / 2
        )
        self._loaded: dict[str, Any] = {}

    # -- saving ----------------------------------------------------------------------------

    def save(self, session: tf.compat.v1.Session) -> Packed:
        """Returns the position, with the attributes "batches" and "checksum"."""
        return Packed({"batches": self._counter.count, "checksum": self._counter.checksum()}, [])

    # -- resuming --------------------------------------------------------------------------

    def load(self, session: tf.compat.v1.Session, packed: Packed | None) -> bool:
        """Loads a saved position; returns False, as it does not show if the data had ended."""
        self._loaded = packed.attributes if packed is not None else {}
        return False

    def resume(self, session: tf.compat.v1.Session, *, from_start: bool) -> None:
        """Skips the batches before the loaded position.

        Collective: all ranks must call it. They exchange their progress every few seconds, so a
        rank that skips more than the others does not exceed their timeout.
        """
        rank, counter = self._communicator.rank, self._counter
        wanted = 0 if from_start else self._loaded.get("batches", 0)
        if wanted:
            _log.info("rank %d skips the %s batches that it read before", rank, f"{wanted:,}")
        else:
            _log.info("rank %d counts its batches, to skip them after a restart", rank)
        read, began_s = self._reader(session), time.monotonic()
        while True:
            self._skip(read, wanted)
            left = self._communicator.all_gather(
                np.array(max(0, wanted - counter.count)), "the number of batches to skip"
            )
            if not left.any():
                break
            if left[rank]:
                counts = f"{counter.count:,} of {wanted:,}"
                _log.info("rank %d: skipped %s batches", rank, counts)
        if wanted:
            took_s = time.monotonic() - began_s
            _log.info("rank %d: skipped %s batches in %.1f s", rank, f"{wanted:,}", took_s)
            self._check_sample()

    def _reader(self, session: tf.compat.v1.Session) -> Callable[[], Any]:
        allowed = allowed_reads(session.graph)
        call = session.make_callable(self._counter.read, [*allowed])
        return lambda: call(*allowed.values())

    def _skip(self, read: Callable[[], Any], wanted: int) -> None:
        until_s = time.monotonic() + self._round_s
        while self._counter.count < wanted and time.monotonic() < until_s:
            try:
                has_data = read()
            except tf.errors.OutOfRangeError:
                has_data = False
            if not has_data:
                raise self._too_few(wanted)

    def _too_few(self, wanted: int) -> hostopt.CheckpointError:
        rank, found = self._communicator.rank, self._counter.count
        return hostopt.CheckpointError(
            f"rank {rank} has {found} batches, wanted the {wanted} that it read before the "
            "checkpoint: resume_data is 'skip', and input_fn returns other data than then. Make "
            f"them deterministic, or remove the checkpoint's file *{SUFFIX} to read the data from "
            "the beginning",
            rank=rank,
        )

    def _check_sample(self) -> None:
        if self._counter.checksum() != self._loaded["checksum"]:
            _log.warning(
                "rank %d: the last of the skipped batches is not the one that was read before the "
                "checkpoint, so the training does not resume exactly. With resume_data='skip' "
                "input_fn must return the same data in each process: fix the seeds of generators, "
                "of shuffle and of random operations",
                self._communicator.rank,
            )
