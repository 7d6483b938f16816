"""Barriers and words in shared memory, and ranks that never arrive."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import pytest
from rings import Spawn

from hostopt.collectives import sequence_counters
from hostopt.collectives.call import CollectiveCall
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.sequence_counters import SequenceCounters, counters_bytes
from hostopt.errors import CollectiveMismatchError, HostOptError, PeerLostError
from hostopt.transport.message import signature_of


def shared_counters(size: int) -> Callable[[Communicator], SequenceCounters]:
    """Returns a function that opens the same counters on each rank."""
    memory = mmap.mmap(-1, counters_bytes(size))

    def open_(communicator: Communicator) -> SequenceCounters:
        return SequenceCounters(memoryview(memory), tuple(range(size)), communicator.transport)

    return open_


def call(step: int, name: str = "") -> CollectiveCall:
    return CollectiveCall(1, step, name=name)


@pytest.mark.parametrize(("count", "nbytes"), [(1, 4096), (32, 4096), (33, 8192)])
def test_size(count: int, nbytes: int) -> None:
    assert counters_bytes(count) == nbytes


@pytest.mark.parametrize("size", [2, 3, 8])
def test_no_rank_passes_a_barrier_before_the_last_one_arrives(
    spawn_inproc: Spawn, size: int
) -> None:
    open_counters = shared_counters(size)
    arrived: list[int] = []  # all threads append

    def work(communicator: Communicator) -> None:
        counters = open_counters(communicator)
        for step in range(50):
            arrived.append(step)
            counters.barrier(call(step), 0)
            assert arrived.count(step) == size

    spawn_inproc(size, work)


def test_a_thread_does_not_spin_while_another_one_does(
    spawn_inproc: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_counters = shared_counters(2)
    # A thread that spins this long would never notice that its peer has left.
    monkeypatch.setattr(sequence_counters, "_SPINS", 1 << 60)

    def work(communicator: Communicator) -> None:
        counters = open_counters(communicator)
        if communicator.rank == 0:
            counters.barrier(call(0, "the bread"), 0)

    with sequence_counters._spinning, pytest.raises(PeerLostError, match="waited for the bread"):
        spawn_inproc(2, work)


def test_a_rank_that_sleeps_is_woken(spawn_inproc: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    open_counters = shared_counters(2)
    monkeypatch.setattr(sequence_counters, "_SPINS", 1)
    monkeypatch.setattr(sequence_counters, "_LONGEST_SLEEP_S", 1e6)

    def work(communicator: Communicator) -> list[list[int]]:
        counters, words = open_counters(communicator), []
        for step in range(100):
            counters.barrier(call(step), 0)
            counters.write_word(step, step * (1 + communicator.rank))
            words.append(counters.read_words(call(step)))
        return words

    assert spawn_inproc(2, work) == [[[step, 2 * step] for step in range(100)]] * 2


def test_a_rank_may_leave_once_it_has_passed_a_barrier(
    spawn_inproc: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_counters = shared_counters(2)
    monkeypatch.setattr(sequence_counters, "_SPINS", 1)
    waits, has_left = threading.Event(), threading.Event()

    def work(communicator: Communicator) -> None:
        counters = open_counters(communicator)
        if communicator.rank == 1:
            assert waits.wait(20)
            counters.barrier(call(0), 0)
            communicator.transport.close()
            has_left.set()
            return
        mailbox = communicator.transport.mailbox
        waiting = mailbox.waiting

        @contextlib.contextmanager
        def look_late(*args: Any) -> Iterator[Callable[[], float]]:
            with waiting(*args) as check:
                waits.set()  # the counter was read before rank 1 arrives
                yield lambda: has_left.wait(20) and check()

        monkeypatch.setattr(mailbox, "waiting", look_late)
        counters.barrier(call(0), 0)

    spawn_inproc(2, work)


def test_the_error_names_the_missing_rank(spawn_inproc: Spawn) -> None:
    open_counters = shared_counters(2)

    def work(communicator: Communicator) -> HostOptError | None:
        counters = open_counters(communicator)
        if communicator.rank == 1:
            return None
        with pytest.raises(HostOptError) as caught:
            counters.barrier(call(3, "the bread"), 0)
        return caught.value

    error, _ = spawn_inproc(2, work)
    assert isinstance(error, PeerLostError)
    assert "rank 1 (worker:1, inproc:1) is gone at step 3" in str(error)
    assert "waited for the bread" in str(error)


@pytest.mark.parametrize("size", [2, 3])
def test_signatures_that_differ(spawn_inproc: Spawn, size: int) -> None:
    open_counters = shared_counters(size)

    def work(communicator: Communicator) -> str:
        counters = open_counters(communicator)
        for step in range(3):  # in turn at two positions
            kind = "barrier" if step == 2 and communicator.rank == 1 else "all_reduce(sum)"
            signed = CollectiveCall(1, step, 0, "bread", signature_of(kind, "bread"))
            communicator.begin(signed)
            counters.begin_call(signed, 8)
            if step < 2:
                counters.barrier(signed, 0)
        with pytest.raises(CollectiveMismatchError) as caught:
            counters.barrier(signed, 0)
        return str(caught.value)

    (text,) = {*spawn_inproc(size, work)}
    assert "rank 1 (worker:1, inproc:1) calls barrier of 'bread' at step 2" in text


@pytest.mark.parametrize("size", [2, 3, 8])
def test_values_are_read_in_rank_order(spawn_inproc: Spawn, size: int) -> None:
    open_counters = shared_counters(size)

    def work(communicator: Communicator) -> None:
        counters, rank = open_counters(communicator), communicator.rank
        for step in range(50):
            counters.write_word(step, (1 << 63) + 100 * step + rank)
            if step % 3 == 0:
                counters.barrier(call(step), 0)
            expected = [(1 << 63) + 100 * step + other for other in range(size)]
            assert counters.read_words(call(step, "the words")) == expected

    spawn_inproc(size, work)


def test_a_value_that_is_never_written(spawn_inproc: Spawn) -> None:
    open_counters = shared_counters(2)

    def work(communicator: Communicator) -> None:
        counters = open_counters(communicator)
        if communicator.rank == 1:
            communicator.transport.close()
            return
        counters.write_word(0, 1)
        counters.read_words(call(0, "the bread"))

    with pytest.raises(PeerLostError, match=r"rank 1 .* is gone .* waited for the bread"):
        spawn_inproc(2, work)


@pytest.mark.parametrize("size", [2, 3])
def test_bitwise_and_of_all_ranks(spawn_inproc: Spawn, size: int) -> None:
    open_counters = shared_counters(size)
    cases = [[0b1101, 0b0111, 0b1111], [0, 1, 3], [1 << 63, 1 << 63 | 1, 1 << 63]]

    def work(communicator: Communicator) -> None:
        counters = open_counters(communicator)
        for step, flags in enumerate(cases * 20):
            result = counters.all_reduce_band(flags[communicator.rank], call(step))
            assert result == reduce(int.__and__, flags[:size])
            counters.barrier(call(step), 1)

    spawn_inproc(size, work)


@pytest.mark.parametrize("size", [2, 3])
def test_values_are_finite_if_all_ranks_say_so(spawn_inproc: Spawn, size: int) -> None:
    open_counters = shared_counters(size)

    def work(communicator: Communicator) -> None:
        counters = open_counters(communicator)
        for step in range(20):
            counters.barrier(call(step), 0)
            odd = step % (size + 1)  # the rank whose values are not finite; none in turn
            result = counters.all_finite(communicator.rank != odd, call(step), 1)
            assert result == (odd == size)

    spawn_inproc(size, work)
