"""Two-level all-reduce against its definition, bit by bit."""

from __future__ import annotations

from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from chunk_bits import check_chunks
from rings import Spawn

from hostopt.collectives import host_memory
from hostopt.collectives.call import CollectiveCall
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.host_memory import HostMemory
from hostopt.collectives.hosts import Hosts
from hostopt.collectives.ring_schedule import chunk_slices
from hostopt.collectives.wire_format import new_wire_format


def values(rank: int, length: int) -> Any:
    random = np.random.default_rng([rank, length])
    scale = 10.0 ** random.integers(0, 4, length)
    return (random.standard_normal(length) * scale).astype(np.float32)


SEGMENT_BYTES = 64


def by_doubling(partials: list[Any]) -> Any:
    """Sums by recursive doubling: of pairs of neighbours, then of pairs of these, and so on."""
    extra = len(partials) - (1 << len(partials).bit_length() - 1)
    pairs = [partials[2 * i] + partials[2 * i + 1] for i in range(extra)]
    partials = pairs + partials[2 * extra :]
    while len(partials) > 1:
        partials = [a + b for a, b in zip(partials[::2], partials[1::2])]
    return partials[0]


ROUND = {
    None: lambda array: array,
    "fp16": lambda array: array.astype(np.float16).astype(np.float32),
    "bf16": lambda array: array.astype(ml_dtypes.bfloat16).astype(np.float32),
}


def reference(groups: list[tuple[int, ...]], length: int, compression: str | None) -> Any:
    """The defined sum: in rank order on each host, then around the ring of leaders."""
    on_host = [reduce(np.add, [values(rank, length) for rank in group]) for group in groups]
    if len(groups) == 1:
        return on_host[0]
    travel = ROUND[compression]
    if len(groups) == 2:  # exchanged: both add what both have rounded
        return travel(on_host[0]) + travel(on_host[1])
    if compression is None and 4 * length <= SEGMENT_BYTES:
        return by_doubling(on_host)
    if compression is None and len(groups) == 4:  # see collectives.halving
        return (on_host[0] + on_host[2]) + (on_host[1] + on_host[3])
    result = np.empty(length, np.float32)
    for index, part in enumerate(chunk_slices(length, len(groups))):
        # chunk c travels from leader c + 1 around to leader c, which adds last
        order = [(index + 1 + i) % len(groups) for i in range(len(groups))]
        partial = on_host[order[0]][part]
        for host in order[1:]:
            partial = on_host[host][part] + travel(partial)
        result[part] = travel(partial)
    return result


@pytest.mark.parametrize(
    "groups",
    [
        [(0, 1)],
        [(0, 1, 2), (3,)],
        [(0, 2), (1, 3)],
        [(0,), (1, 2), (3,)],
        [(0, 1), (2, 3), (4, 5), (6, 7)],
        [(0, 1, 2, 3, 4, 5, 6, 7)],
    ],
)
@pytest.mark.parametrize("compression", [None, "fp16", "bf16"])
def test_results_have_the_defined_bits(
    spawn_inproc: Spawn,
    monkeypatch: pytest.MonkeyPatch,
    groups: list[tuple[int, ...]],
    compression: str | None,
) -> None:
    monkeypatch.setattr(host_memory, "SMALL_BLOCK_BYTES", 4096)
    monkeypatch.setattr(host_memory, "BLOCK_BYTES", 4096)
    hosts = Hosts(tuple(groups))
    size = sum(map(len, groups))

    def work(communicator: Communicator) -> None:
        memory = HostMemory(communicator.duplicate(), hosts)
        for step, length in enumerate([0, 1, 5, 1024, 1025, 3001]):
            local = values(communicator.rank, length)
            wire_format = new_wire_format(compression)
            hierarchical = memory.hierarchical(local.nbytes)
            assert hierarchical is not None
            hierarchical.all_reduce(local, np.add, CollectiveCall(7, step), wire_format)
            np.testing.assert_array_equal(local, reference(groups, length, compression))

    spawn_inproc(size, work, segment_bytes=SEGMENT_BYTES)


@pytest.mark.parametrize(
    "groups",
    [[(0,), (1,)], [(0, 1), (2, 3)], [(0, 1, 2), (3, 4, 5)], [(0, 1), (2, 3), (4, 5), (6, 7)]],
)
@pytest.mark.parametrize("compression", [None, "bf16"])
def test_chunks_of_even_hosts_have_the_bits_of_an_all_reduce(
    spawn_inproc: Spawn, groups: list[tuple[int, ...]], compression: str | None
) -> None:
    def work(plain: Communicator) -> None:
        communicator = Communicator(plain.transport, 1, "chunks", Hosts(tuple(groups)))
        assert communicator.has_chunks
        check_chunks(communicator, values(communicator.rank, 24 * 1000), compression)

    spawn_inproc(sum(map(len, groups)), work, segment_bytes=4096)


@pytest.mark.parametrize("groups", [[(0, 1, 2), (3,)], [(0, 2), (1, 3)]])
def test_chunks_of_uneven_hosts_are_gathered(
    spawn_inproc: Spawn, groups: list[tuple[int, ...]]
) -> None:
    def work(plain: Communicator) -> None:
        communicator = Communicator(plain.transport, 1, "chunks", Hosts(tuple(groups)))
        assert not communicator.has_chunks
        flat = np.where(np.arange(4000) // 1000 == communicator.rank, 1.0, np.nan)
        communicator.all_gather_in_place(flat)
        assert (flat == 1).all()

    spawn_inproc(4, work)
