"""Blocks of staging buffers: disjoint, aligned, and the same for bytes and arrays."""

from __future__ import annotations

import numpy as np
import pytest

from hostopt.collectives.sequence_counters import counters_bytes
from hostopt.collectives.shared_memory import StagingBuffers, channel_bytes

BLOCK_BYTES = 4096


@pytest.mark.parametrize(("count", "slots"), [(2, 4), (3, 2), (8, 2)])
def test_blocks_fill_the_memory(count: int, slots: int) -> None:
    nbytes = channel_bytes(count, BLOCK_BYTES)
    memory = bytearray(nbytes)
    staging = StagingBuffers(memoryview(memory), count, BLOCK_BYTES)
    buffers = count + (count > 2)
    for slot in range(slots):
        for index in range(buffers):
            block = staging.block(index, np.dtype(np.uint8), BLOCK_BYTES)
            assert not block.any()  # no other block has the same memory
            block[:] = 1 + slot * buffers + index
        staging.next_slot()
    counters = counters_bytes(count)
    assert not any(memory[:counters])
    assert all(memory[counters:])
    assert nbytes == counters + slots * buffers * BLOCK_BYTES
    # the slots are used in turn
    assert staging.block(0, np.dtype(np.uint8), 1)[0] == 1


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int64])
def test_arrays_and_bytes_are_the_same_memory(count: int, dtype: type[np.generic]) -> None:
    memory = memoryview(bytearray(channel_bytes(count, BLOCK_BYTES)))
    staging = StagingBuffers(memory, count, BLOCK_BYTES)
    for _ in range(5):
        staging.next_slot()
        blocks = staging.blocks(np.dtype(dtype), 10)
        for index, (block, data) in enumerate(zip(blocks, staging.bytes_of_blocks())):
            assert block.shape == (10,)
            block[:] = index + 1
            assert len(data) == BLOCK_BYTES
            assert data[: block.nbytes] == block.tobytes()
