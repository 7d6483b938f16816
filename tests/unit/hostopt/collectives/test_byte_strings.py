"""Gathered and scattered byte strings, and tables that must be the same on all ranks."""

from __future__ import annotations

import numpy as np
import pytest
from rings import Spawn

from hostopt.collectives.communicator import Communicator
from hostopt.collectives.host_memory import SMALL_BLOCK_BYTES
from hostopt.errors import CollectiveMismatchError, HostOptError


@pytest.mark.parametrize(
    "texts",
    [
        [b""],
        [b"alone"],
        [b"", b""],
        [b"", b"x", b"two words"],
        [b"\0\0", b"\0", bytes(range(256))],
    ],
)
def test_all_gather_bytes_of_different_lengths(spawn: Spawn, texts: list[bytes]) -> None:
    result = spawn(len(texts), lambda c: c.all_gather_bytes(texts[c.rank]), segment_bytes=16)
    assert result == [texts] * len(texts)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_gather_bytes_of_several_segments_and_blocks(spawn: Spawn, size: int) -> None:
    lengths = [0, 1, 1000, SMALL_BLOCK_BYTES - 8, SMALL_BLOCK_BYTES - 7, 300_000]

    def text(rank: int, turn: int) -> bytes:
        length = lengths[(rank + turn) % len(lengths)]
        return np.random.default_rng([rank, turn]).integers(0, 256, length, np.uint8).tobytes()

    def work(communicator: Communicator) -> None:
        for turn in range(len(lengths)):
            local = text(communicator.rank, turn)
            expected = [text(rank, turn) for rank in range(size)]
            assert communicator.all_gather_bytes(local) == expected
            communicator.all_reduce(np.ones(9))  # shares the memory with it
            array = np.frombuffer(local, np.uint8).copy()
            result = communicator.all_gather_bytes(array)
            assert result == expected
            assert all(memoryview(each).readonly for each in result)
            assert communicator.all_gather_bytes(memoryview(local)) == expected

    spawn(size, work, segment_bytes=10_000)


def test_all_gather_bytes_is_one_schedule(spawn_ring: Spawn) -> None:
    size, length, segment_bytes = 3, 250, 100

    def work(communicator: Communicator) -> tuple[int, int]:
        traffic = communicator.transport.traffic
        before = traffic.messages, traffic.payload_bytes
        communicator.all_gather_bytes(bytes(length))
        return traffic.messages - before[0], traffic.payload_bytes - before[1]

    result = spawn_ring(size, work, segment_bytes=segment_bytes)
    assert result == [(3 * (size - 1), (length + 8) * (size - 1))] * size


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"dense/kernel": "[3, 4] float32", "": "x"},
        {"a note": "two\nlines\tand a tab\u2028", "equation": "a=b"},
    ],
    ids=["none", "some", "with-line-breaks"],
)
def test_equal_entries_in_a_different_order(spawn: Spawn, entries: dict[str, str]) -> None:
    def work(communicator: Communicator) -> None:
        items = list(entries.items())
        order = items if communicator.rank else items[::-1]
        names = communicator.check_same(dict(order), "the notes")
        assert names == list(entries)[::-1]  # as rank 0 has them

    spawn(3, work)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"a": "[3] float32", "b": "[9] float32"}, ["'b'", "[2] float32", "[9] float32"]),
        ({"a": "[3] float32"}, ["'b'", "[2] float32", "none"]),
        (
            {"a": "[3] float32", "b": "[2] float32", "c": "[5] int32"},
            ["'c'", "none", "[5] int32"],
        ),
    ],
    ids=["differs", "missing", "extra"],
)
def test_different_entries_are_reported_with_both_ranks(
    spawn: Spawn, other: dict[str, str], named: list[str]
) -> None:
    entries = {"a": "[3] float32", "b": "[2] float32"}

    def work(communicator: Communicator) -> HostOptError:
        local = other if communicator.rank == 2 else entries
        with pytest.raises(CollectiveMismatchError) as caught:
            communicator.check_same(local, "the gradients to reduce")
        return caught.value

    for error in spawn(3, work):
        for words in ["the gradients to reduce", "rank 0", "rank 2", *named]:
            assert words in str(error)
        assert "'a'" not in str(error)
        assert error.rank == 2
        assert error.task in ("worker:1", "worker:2")


def test_each_differing_entry_is_named_with_the_values_of_all_ranks(
    spawn_inproc: Spawn,
) -> None:
    many = {f"many/{i:02}": "[1] int32" for i in range(25)}
    tables = [
        {"a": "[3] float32", "b": "[2] float32", "c": "[7] int32"},
        {"a": "[3] float32", "b": "[2] float32", "c": "[7] int32"},
        {"a": "[3] float32", "b": "[9] float32", "c": "[7] int32"},
        {"a": "[3] float32", "b": "[9] float32", **many},
    ]

    def work(communicator: Communicator) -> HostOptError:
        with pytest.raises(CollectiveMismatchError) as caught:
            communicator.check_same(tables[communicator.rank], "the notes")
        return caught.value

    errors = spawn_inproc(4, work)
    assert len({str(error) for error in errors}) == 1
    message = str(errors[0])
    assert "'b': rank 0 has [2] float32, ranks 2, 3 have [9] float32; " in message
    assert "'c': rank 0 has [7] int32, rank 3 has none; " in message
    assert "'many/17': rank 0 has none, rank 3 has [1] int32; and 7 more. " in message
    assert "'many/18'" not in message
    assert "rank 1" not in message
    assert {error.rank for error in errors} == {2}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gather_and_scatter_bytes(spawn: Spawn, size: int) -> None:
    texts = [bytes([rank]) * (50 * rank) for rank in range(size)]

    def work(communicator: Communicator) -> bytes:
        gathered = communicator.gather_bytes(texts[communicator.rank], "the texts")
        assert gathered == (texts if communicator.rank == 0 else [])
        return communicator.scatter_bytes(gathered, "the texts")

    assert spawn(size, work, segment_bytes=16) == texts
