"""Buckets on their way: `launch` hands one over and returns, `wait` hands it back reduced.

The numbers are those of the way of a gradient in docs/architecture.md.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence

from hostopt.bucket import Bucket, BufferPool
from hostopt.communicator import Communicator, ReduceOp
from hostopt.errors import CollectiveTimeoutError, ConfigError, PeerLostError
from hostopt.ring import Array, Operation

__all__: list[str] = []


class Reducer:
    """Sums buckets over the ranks on a communication thread, in bucket order on every rank.

    Each step launches every bucket once and waits for every bucket once, from any thread and in
    any order.

    Args:
      communicator: a communicator of its own (a `duplicate`).
      buckets: the fusion plan, the same on all ranks.
    """

    def __init__(self, communicator: Communicator, buckets: Sequence[Bucket]) -> None:
        self._communicator = communicator
        self._buckets = tuple(buckets)
        self._pools = [BufferPool(bucket) for bucket in buckets]
        self._under_way: set[int] = set()  # from launch to wait
        self._launched: dict[int, Array] = {}
        self._reduced: dict[int, Array] = {}
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._in_ring = False
        self._progress_s = time.monotonic()
        self._stop_listening = communicator.transport.mailbox.on_failure(self._fail)
        self._thread = threading.Thread(target=self._run, daemon=True, name="hostopt-reducer")
        self._thread.start()

    def launch(self, bucket: int, arrays: Sequence[Array]) -> None:
        """Start the reduction of a bucket; returns at once.

        Args:
          bucket: index of the bucket.
          arrays: its gradients, in packing order; they may be freed once this returns.

        Raises:
          HostOptError: the ring has failed.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            if bucket in self._under_way:
                raise ConfigError(
                    f"bucket {bucket} ({self._buckets[bucket].what}) was launched twice in one "
                    "step. Run the training operation once in each session.run",
                    bucket=bucket,
                )
            self._under_way.add(bucket)
            buffer = self._pools[bucket].take()
        self._buckets[bucket].pack(arrays, buffer)  # 3. into the flat buffer
        with self._changed:
            self._launched[bucket] = buffer
            self._progress_s = time.monotonic()
            self._changed.notify_all()

    def wait(self, bucket: int) -> list[Array]:
        """Wait until a launched bucket is reduced.

        Args:
          bucket: index of the bucket.

        Returns:
          Its reduced gradients, in packing order; views of a buffer that is not used again
          while they live.

        Raises:
          HostOptError: a rank failed, left or timed out.
        """
        timeout_s = self._communicator.transport.options.collective_timeout_s
        with self._changed:
            while bucket not in self._reduced:
                if self._error is not None:
                    raise self._error
                # the ring has deadlines of its own; this one ends a wait for a lost launch
                left_s = self._progress_s + timeout_s - time.monotonic()
                if left_s <= 0 and not self._in_ring:
                    raise self._never_launched(bucket)
                self._changed.wait(None if self._in_ring else left_s)
            buffer = self._reduced.pop(bucket)
            self._under_way.discard(bucket)
        return self._buckets[bucket].views(buffer)  # 5. back to the graph

    def close(self) -> None:
        """End the communication thread once its current bucket is done, and free the buffers."""
        self._fail(PeerLostError("this reducer is closed", rank=self._communicator.rank))
        self._stop_listening()
        self._thread.join(self._communicator.transport.options.collective_timeout_s)
        self._pools.clear()

    def _run(self) -> None:
        try:
            for step in itertools.count():
                for index in range(len(self._buckets)):
                    self._reduce(step, index)
        except BaseException as error:
            if self._error is None:
                self._communicator.abort(error)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _reduce(self, step: int, index: int) -> None:
        operation = Operation(self._communicator.channel, step, index, self._what(index))
        with self._changed:
            while index not in self._launched:  # idle until the graph launches the next bucket
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            buffer = self._launched.pop(index)
            self._in_ring = True
        # 4. the ring, while backward goes on
        self._communicator.all_reduce_in_place(buffer, ReduceOp.SUM, operation)
        with self._changed:
            self._reduced[index] = buffer
            self._in_ring = False
            self._progress_s = time.monotonic()
            self._changed.notify_all()

    def _what(self, index: int) -> str:
        return f"{self._buckets[index].what} (bucket {index + 1}/{len(self._buckets)})"

    def _never_launched(self, bucket: int) -> CollectiveTimeoutError:
        rank = self._communicator.rank
        return CollectiveTimeoutError(
            f"rank {rank} waited for {self._what(bucket)}, and no bucket was launched or reduced "
            "meanwhile. A gradient of an earlier bucket was never computed: look whether the "
            "accelerator still works",
            rank=rank,
            bucket=bucket,
        )
