"""Ring schedules as literal grids."""

from __future__ import annotations

import numpy as np
import pytest

from hostopt.collectives.ring_schedule import (
    all_gather_rounds,
    all_reduce_rounds,
    chunk_slices,
    reduce_scatter_rounds,
    segments,
)


def test_all_reduce_of_three_ranks() -> None:
    schedules = [all_reduce_rounds(rank, 3) for rank in range(3)]
    assert [[round_.send for round_ in rounds] for rounds in zip(*schedules)] == [
        [2, 0, 1],
        [1, 2, 0],
        [0, 1, 2],
        [2, 0, 1],
    ]
    assert [[round_.recv for round_ in rounds] for rounds in zip(*schedules)] == [
        [1, 2, 0],
        [0, 1, 2],
        [2, 0, 1],
        [1, 2, 0],
    ]
    assert [[round_.reduce for round_ in rounds] for rounds in zip(*schedules)] == [
        [True] * 3,
        [True] * 3,
        [False] * 3,
        [False] * 3,
    ]


def test_reduce_scatter_of_four_ranks() -> None:
    schedules = [reduce_scatter_rounds(rank, 4) for rank in range(4)]
    assert [[tuple(round_) for round_ in rounds] for rounds in zip(*schedules)] == [
        [(3, 2, True), (0, 3, True), (1, 0, True), (2, 1, True)],
        [(2, 1, True), (3, 2, True), (0, 3, True), (1, 0, True)],
        [(1, 0, True), (2, 1, True), (3, 2, True), (0, 3, True)],
    ]


def test_one_rank_has_no_rounds() -> None:
    assert all_reduce_rounds(0, 1) == []
    assert reduce_scatter_rounds(0, 1) == []
    assert all_gather_rounds(0, 1) == []


@pytest.mark.parametrize(
    ("length", "size", "lengths"),
    [(0, 3, [0, 0, 0]), (2, 3, [1, 1, 0]), (10, 4, [3, 3, 2, 2]), (12, 3, [4, 4, 4])],
)
def test_chunk_lengths_differ_by_at_most_one(length: int, size: int, lengths: list[int]) -> None:
    slices = chunk_slices(length, size)
    assert [len(range(length)[part]) for part in slices] == lengths
    assert [i for part in slices for i in range(length)[part]] == list(range(length))


def test_two_ranks_exchange_the_whole_buffer() -> None:
    for rank in range(2):
        (round_,) = all_reduce_rounds(rank, 2)
        assert round_ == (0, 0, True)
        assert round_.phase == "exchange"


def test_phases_of_the_schedule() -> None:
    phases = [round_.phase for round_ in all_reduce_rounds(1, 3)]
    assert phases == ["reduce-scatter"] * 2 + ["all-gather"] * 2


@pytest.mark.parametrize(
    ("length", "segment_bytes", "lengths"), [(5, 8, [2, 2, 1]), (4, 8, [2, 2]), (2, 1, [1, 1])]
)
def test_segments(length: int, segment_bytes: int, lengths: list[int]) -> None:
    chunk = np.arange(length, dtype=np.float32)
    parts = list(segments(chunk, segment_bytes))
    assert [index for index, _ in parts] == list(range(len(lengths)))
    assert [part.size for _, part in parts] == lengths
    assert all(np.shares_memory(part, chunk) for _, part in parts)


def test_an_empty_chunk_is_one_segment_or_none() -> None:
    empty = np.empty(0, np.float32)
    assert [part.size for _, part in segments(empty, 8)] == [0]
    assert list(segments(empty, 8, at_least_one=False)) == []
