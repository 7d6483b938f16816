"""Barriers, duplicates, invalid arguments, and errors of ranks that time out or leave."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
from clocks import Clock, until_blocked
from harness import until
from rings import Spawn, failure
from threads import in_threads

from hostopt.collectives.call import CollectiveCall
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.errors import (
    CollectiveTimeoutError,
    ConfigError,
    HostOptError,
    PeerLostError,
)
from hostopt.transport.inproc import InprocTransport
from hostopt.transport.message import FINISH_CHANNEL, channel_number

# --- collectives ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_rank_passes_a_barrier_before_all_arrive(spawn: Spawn, size: int) -> None:
    rounds, come = 20, [0] * size

    def work(communicator: Communicator) -> None:
        for number in range(1, rounds + 1):
            come[communicator.rank] = number
            communicator.barrier()
            assert min(come) >= number

    spawn(size, work)
    assert come == [rounds] * size


def test_duplicates_do_not_mix(spawn: Spawn) -> None:
    def work(communicator: Communicator) -> list[float]:
        channels = [communicator, communicator.duplicate("one"), communicator.duplicate("two")]
        sums: dict[int, float] = {}

        def reduce(number: int) -> None:
            for _ in range(10):
                local = np.full(7, 10.0**number)
                sums[number] = float(channels[number].all_reduce(local)[3])

        # the ranks start them in different orders
        in_threads(reduce, range(3) if communicator.rank else reversed(range(3)))
        return [sums[number] for number in range(3)]

    assert spawn(3, work, segment_bytes=16) == [[3.0, 30.0, 300.0]] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_duplicates_are_matched_by_name_in_any_order(spawn: Spawn, size: int) -> None:
    names = ["a", "b", "c", "b"]  # the second "b" is another channel than the first

    def work(communicator: Communicator) -> list[float]:
        order = [(number + communicator.rank) % 3 for number in range(3)]
        opened = {names[number]: communicator.duplicate(names[number]) for number in order}
        opened["b again"] = communicator.duplicate("b")
        sums: dict[str, float] = {}

        def reduce(name: str, value: float) -> None:
            sums[name] = float(opened[name].all_reduce(np.full(5, value))[0])

        calls = [("a", 1.0), ("b", 10.0), ("c", 100.0), ("b again", 1000.0)]
        in_threads(lambda call: reduce(*call), calls if communicator.rank else reversed(calls))
        return [sums[name] for name, _ in calls]

    assert spawn(size, work) == [[size * 10.0**number for number in range(4)]] * size


def test_duplicates_without_a_name_are_counted_separately(spawn_inproc: Spawn) -> None:
    def work(communicator: Communicator) -> list[int]:
        if communicator.rank == 0:
            communicator.duplicate("of rank 0")
        nested = communicator.duplicate().duplicate()
        return [nested.channel, nested.duplicate("gradients").channel]

    first, second = spawn_inproc(2, work)
    assert first == second
    assert len({*first, 0, FINISH_CHANNEL}) == 4


def test_the_number_of_a_name_is_stable_across_releases() -> None:
    assert channel_number("gradients (1)") == 2029452144
    assert channel_number("gradients (2)") == 2009156928


def test_two_names_with_the_same_number_raise_an_error(spawn_inproc: Spawn) -> None:
    def work(communicator: Communicator) -> None:
        communicator.duplicate("variable_9273")
        with pytest.raises(ConfigError, match=r"'variable_9273 \(1\)' and .* Rename one"):
            communicator.duplicate("variable_110963")

    spawn_inproc(2, work)


def test_a_communicator_is_a_context_manager_that_aborts_on_errors(spawn: Spawn) -> None:
    met = threading.Barrier(3)  # an error may also end the rendezvous of the others, rightly

    def work(communicator: Communicator) -> BaseException:
        met.wait(30)
        with pytest.raises(BaseException) as caught, communicator:
            if communicator.rank == 1:
                raise KeyError("flour")
            communicator.barrier()
        return caught.value

    first, second, third = spawn(3, work)
    assert isinstance(second, KeyError)
    for error in (first, third):
        assert isinstance(error, PeerLostError)
        assert error.rank == 1
        assert error.root_cause == "KeyError: 'flour'"


# --- invalid arguments ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", ["i2", "u2", "u8", "?", "c8", "S3", "M8[s]", "O"])
def test_other_dtypes_cannot_be_reduced(spawn_inproc: Spawn, size: int, dtype: str) -> None:
    def work(communicator: Communicator) -> None:
        local = np.zeros(5, dtype)
        for reduce in (communicator.all_reduce, communicator.reduce_scatter):
            with pytest.raises(ConfigError, match=r"float16, bfloat16.*int64") as caught:
                reduce(local)
            assert f"dtype {local.dtype.name} " in str(caught.value)

    spawn_inproc(size, work)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", ["i4", "i8"])
def test_integers_have_no_average(spawn_inproc: Spawn, size: int, dtype: str) -> None:
    def work(communicator: Communicator) -> None:
        for reduce in (communicator.all_reduce, communicator.reduce_scatter):
            with pytest.raises(ConfigError, match=r"AVERAGE of int(32|64)"):
                reduce(np.zeros(5, dtype), ReduceOp.AVERAGE)

    spawn_inproc(size, work)


@pytest.mark.parametrize("root", [-1, 2, 17])
def test_a_root_is_a_rank(spawn_inproc: Spawn, root: int) -> None:
    def work(communicator: Communicator) -> None:
        with pytest.raises(ConfigError, match=rf"root is {root}.*0 to 1"):
            communicator.broadcast(np.zeros(3), root)

    spawn_inproc(2, work)


# --- the end ----------------------------------------------------------------------------------


def test_a_rank_that_waits_for_one_that_has_closed(spawn: Spawn) -> None:
    def work(communicator: Communicator) -> HostOptError | None:
        communicator.barrier()
        if communicator.rank == 0:
            return None
        return failure(communicator, lambda: communicator.broadcast(np.ones(3), name="weights"))

    for rank, error in enumerate(spawn(3, work)[1:], start=1):
        assert isinstance(error, PeerLostError), rank
        assert error.rank == 0
        assert "rank 0" in str(error)


# --- timeouts and errors ----------------------------------------------------------------------


def test_a_timeout_names_both_ranks_and_the_data(
    spawn: Spawn, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    ring: list[Communicator] = []
    done = threading.Event()
    clock.govern_waits()

    def warnings() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == "hostopt.transport.base"]

    def be_busy(communicator: Communicator) -> None:
        waiting = until_blocked(ring, communicator)
        for expected in (1, 2, 2):  # the second after twice the time, and the next at 120 s
            clock.advance(30.0, *waiting)
            until(lambda expected=expected: len(warnings()) == expected, "warning")
        clock.advance(210.0, *waiting)
        assert done.wait(30)

    def work(communicator: Communicator) -> HostOptError | None:
        ring.append(communicator)
        communicator.barrier()
        if communicator.rank == 1:
            return be_busy(communicator)
        local, call = np.ones(9), CollectiveCall(communicator.channel, 1, 3, "'dense/kernel'")
        with pytest.raises(CollectiveTimeoutError) as caught:
            communicator.all_reduce_in_place(local, ReduceOp.SUM, call)
        done.set()
        assert caught.value.address == communicator.transport.cluster.ring[1].address
        return caught.value

    with caplog.at_level(logging.WARNING, "hostopt"):
        error, _ = spawn(2, work, stall_warning_s=30.0, collective_timeout_s=300.0)
    assert (error.rank, error.step, error.bucket) == (1, 1, 3)
    assert error.task in ("worker:0", "worker:1")
    expected = [
        "rank 0",
        "rank 1",
        error.task,
        error.address,
        "step 1",
        "bucket 3",
        "dense/kernel",
    ]
    for words in [*expected, "collective_timeout_s"]:
        assert words in str(error)
    assert len(warnings()) == 2
    for words in expected:
        assert all(words in warning for warning in warnings())


def test_no_warning_without_a_stall(spawn: Spawn, caplog: pytest.LogCaptureFixture) -> None:
    def work(communicator: Communicator) -> None:
        for _ in range(50):
            communicator.all_reduce(np.ones(1000))

    with caplog.at_level(logging.WARNING):
        spawn(3, work, stall_warning_s=20.0)
    assert not caplog.records


def test_an_error_of_the_user_is_the_root_cause_everywhere(spawn: Spawn) -> None:
    all_met = threading.Barrier(4)

    def work(communicator: Communicator) -> HostOptError:
        all_met.wait(30)
        if communicator.rank == 2:
            communicator.abort(ValueError("no more flour"))
        return failure(communicator, communicator.barrier)

    for error in spawn(4, work):
        assert isinstance(error, PeerLostError)
        assert error.rank == 2
        assert error.root_cause == "ValueError: no more flour"
        assert "rank 2" in str(error)
        assert "no more flour" in str(error)


def test_a_rank_that_receives_an_error_first_leaves_with_that_error() -> None:
    transports = InprocTransport.connect(3)
    error = PeerLostError("rank 0 stopped: of the user", rank=0)
    transports[1].mailbox.fail(error)
    transports[1].close()
    assert transports[2].error is error
