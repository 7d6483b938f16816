"""Clock offsets, over every transport."""

from __future__ import annotations

import itertools
import time

import pytest
from rings import Spawn

from hostopt.collectives.communicator import Communicator
from hostopt.measure import clock as clock_module
from hostopt.measure.clock import ClockOffset, measure_offset

SHIFT_S = [0.0, -1000.0, 250.0, 1e6]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_offset_of_a_shifted_clock(spawn: Spawn, size: int) -> None:
    def work(communicator: Communicator) -> ClockOffset:
        shift_s = SHIFT_S[communicator.rank]
        return measure_offset(communicator.duplicate(), lambda: time.monotonic() + shift_s)

    result = spawn(size, work)
    assert result[0] == ClockOffset(0.0, 0.0)
    for rank in range(1, size):
        assert abs(result[rank].offset_s + SHIFT_S[rank]) <= result[rank].round_trip_s


def test_the_shortest_round_trip_determines_the_offset(
    spawn_inproc: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_module, "TRIPS", 3)
    # rank 1 sends at 0, 10, 20 and receives at 5, 11, 28; rank 0 answers at 102, 110.25, 123
    clocks = [iter([102.0, 110.25, 123.0]), iter([0.0, 5.0, 10.0, 11.0, 20.0, 28.0])]

    def work(communicator: Communicator) -> ClockOffset:
        clock = clocks[communicator.rank]
        return measure_offset(communicator.duplicate(), lambda: next(clock))

    assert spawn_inproc(2, work)[1] == ClockOffset(99.75, 1.0)


def test_other_channels_can_be_used_at_the_same_time(spawn_inproc: Spawn) -> None:
    ticks = itertools.count()

    def work(communicator: Communicator) -> list[float]:
        for _ in range(3):
            measure_offset(communicator.duplicate(), lambda: float(next(ticks)))
        return [float(x) for x in communicator.all_reduce([1.0, 2.0])]

    assert spawn_inproc(3, work) == [[3.0, 6.0]] * 3
