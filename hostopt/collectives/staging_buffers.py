"""Staging buffers of the ranks of one host in shared memory.

For n ranks, the memory contains

    counters            a cache line for each rank; see `sequence_counters`
    staging buffers     one for each rank, which it writes and the others read
    sums                one more buffer, for n > 2

A buffer consists of *slots* of one block each. All ranks use the same slot at the same time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hostopt.collectives.call import Array
from hostopt.collectives.sequence_counters import counters_bytes


def channel_bytes(count: int, block_bytes: int) -> int:
    """Returns the size of the shared memory of a channel.

    Args:
      block_bytes: size of a block, a multiple of 4096.

    Returns:
      Size in bytes.
    """
    buffers = count + (count > 2)
    return counters_bytes(count) + buffers * _slot_count(count) * block_bytes


def _slot_count(count: int) -> int:
    # Two slots are needed. Memory that another core has just read is slow to write. With four
    # slots it has left the other core's cache before it is written again.
    return 4 if count == 2 else 2


class StagingBuffers:
    """Addresses the blocks of the current slot.

    Args:
      memory: shared memory of `channel_bytes`.
      block_bytes: size of a block in bytes.
    """

    def __init__(self, memory: memoryview, count: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._memory = memory
        self._begin = counters_bytes(count)
        self._count = count
        self._slots = _slot_count(count)
        self._slot = 0
        self._arrays: dict[np.dtype[Any], Array] = {}  # all buffers as one array, by dtype

    def next_slot(self) -> None:
        """Moves on to the next slot."""
        self._slot = (self._slot + 1) % self._slots

    def block(self, index: int, dtype: np.dtype[Any], size: int) -> Array:
        """Returns the block of the current slot in one buffer.

        Args:
          index: index of the rank on this host; the number of ranks for the sums.
          size: number of elements, at most a block.

        Returns:
          Array of shape [size] in shared memory.
        """
        if dtype not in self._arrays:
            count = (len(self._memory) - self._begin) // dtype.itemsize
            self._arrays[dtype] = np.frombuffer(self._memory, dtype, count, self._begin)
        start = (index * self._slots + self._slot) * (self.block_bytes // dtype.itemsize)
        return self._arrays[dtype][start : start + size]

    def blocks(self, dtype: np.dtype[Any], size: int) -> list[Array]:
        """Returns the block of the current slot of each rank; see `block`."""
        return [self.block(index, dtype, size) for index in range(self._count)]

    def bytes_of_blocks(self) -> list[memoryview]:
        """Returns the bytes of the block of the current slot of each rank."""
        starts = [
            self._begin + (index * self._slots + self._slot) * self.block_bytes
            for index in range(self._count)
        ]
        return [self._memory[start : start + self.block_bytes] for start in starts]
