"""What a communicator refuses, how ranks part, and what a rank says that waits in vain."""

from __future__ import annotations

import logging
import re
import threading
from typing import Any

import numpy as np
import pytest
from conftest import Spawn

from hostopt.communicator import SMALL_BLOCK_BYTES, Communicator, ReduceOp
from hostopt.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ConfigError,
    HostOptError,
    PeerLostError,
)
from hostopt.ring import Operation
from hostopt.transport import event_loop
from hostopt.transport.base import FINISH_CHANNEL, Tag, channel_number
from hostopt.transport.inproc import InprocTransport


def failure(communicator: Communicator, call: Any) -> HostOptError:
    """The error of a call that must fail; the other ranks are told, as `with` would do."""
    with pytest.raises(HostOptError) as caught:
        call()
    communicator.abort(caught.value)
    return caught.value


# --- what works -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_rank_passes_a_barrier_before_all_have_come(spawn: Spawn, size: int) -> None:
    rounds, come = 20, [0] * size

    def work(communicator: Communicator) -> None:
        for number in range(1, rounds + 1):
            come[communicator.rank] = number
            communicator.barrier()
            assert min(come) >= number

    spawn(size, work)
    assert come == [rounds] * size


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
def test_all_gather_bytes_of_differing_lengths(spawn: Spawn, texts: list[bytes]) -> None:
    found = spawn(len(texts), lambda c: c.all_gather_bytes(texts[c.rank]), segment_bytes=16)
    assert found == [texts] * len(texts)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_gather_bytes_of_several_segments_and_blocks(spawn: Spawn, size: int) -> None:
    lengths = [0, 1, 1000, SMALL_BLOCK_BYTES - 8, SMALL_BLOCK_BYTES - 7, 300_000]

    def text(rank: int, turn: int) -> bytes:
        length = lengths[(rank + turn) % len(lengths)]
        return np.random.default_rng([rank, turn]).integers(0, 256, length, np.uint8).tobytes()

    def work(communicator: Communicator) -> None:
        for turn in range(len(lengths)):
            mine = text(communicator.rank, turn)
            wanted = [text(rank, turn) for rank in range(size)]
            assert communicator.all_gather_bytes(mine) == wanted
            communicator.all_reduce(np.ones(9))  # shares the memory with it
            array = np.frombuffer(mine, np.uint8).copy()
            found = communicator.all_gather_bytes(array)
            assert found == wanted
            assert all(memoryview(each).readonly for each in found)
            assert communicator.all_gather_bytes(memoryview(mine)) == wanted

    spawn(size, work, segment_bytes=10_000)


def test_all_gather_bytes_is_one_schedule(spawn_ring: Spawn) -> None:
    size, length, segment_bytes = 3, 250, 100

    def work(communicator: Communicator) -> tuple[int, int]:
        traffic = communicator.transport.traffic
        before = traffic.messages, traffic.payload_bytes
        communicator.all_gather_bytes(bytes(length))
        return traffic.messages - before[0], traffic.payload_bytes - before[1]

    found = spawn_ring(size, work, segment_bytes=segment_bytes)
    assert found == [(3 * (size - 1), (length + 8) * (size - 1))] * size


def test_duplicates_do_not_mix(spawn: Spawn) -> None:
    def work(communicator: Communicator) -> list[float]:
        channels = [communicator, communicator.duplicate("one"), communicator.duplicate("two")]
        sums: dict[int, float] = {}

        def reduce(number: int) -> None:
            for _ in range(10):
                mine = np.full(7, 10.0**number)
                sums[number] = float(channels[number].all_reduce(mine)[3])

        threads = [threading.Thread(target=reduce, args=(number,)) for number in range(3)]
        # the ranks start them in different orders
        for thread in threads if communicator.rank else reversed(threads):
            thread.start()
        for thread in threads:
            thread.join()
        return [sums[number] for number in range(3)]

    assert spawn(3, work, segment_bytes=16) == [[3.0, 30.0, 300.0]] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_duplicates_are_matched_by_name_in_whatever_order(spawn: Spawn, size: int) -> None:
    names = ["a", "b", "c", "b"]  # the second "b" is another channel than the first

    def work(communicator: Communicator) -> list[float]:
        order = [(number + communicator.rank) % 3 for number in range(3)]
        opened = {names[number]: communicator.duplicate(names[number]) for number in order}
        opened["b again"] = communicator.duplicate("b")
        sums: dict[str, float] = {}

        def reduce(name: str, value: float) -> None:
            sums[name] = float(opened[name].all_reduce(np.full(5, value))[0])

        threads = [
            threading.Thread(target=reduce, args=(name, 10.0**number))
            for number, name in enumerate(["a", "b", "c", "b again"])
        ]
        for thread in threads if communicator.rank else reversed(threads):
            thread.start()
        for thread in threads:
            thread.join()
        return [sums[name] for name in ("a", "b", "c", "b again")]

    assert spawn(size, work) == [[size * 10.0**number for number in range(4)]] * size


def test_duplicates_without_a_name_are_counted_by_themselves(spawn_inproc: Spawn) -> None:
    def work(communicator: Communicator) -> list[int]:
        if communicator.rank == 0:
            communicator.duplicate("of rank 0")
        nested = communicator.duplicate().duplicate()
        return [nested.channel, nested.duplicate("gradients").channel]

    first, second = spawn_inproc(2, work)
    assert first == second
    assert len({*first, 0, FINISH_CHANNEL}) == 4


def test_the_number_of_a_name_is_the_same_in_all_releases() -> None:
    assert channel_number("gradients (1)") == 2029452144
    assert channel_number("gradients (2)") == 2009156928


def test_two_names_of_one_number_are_refused(spawn_inproc: Spawn) -> None:
    def work(communicator: Communicator) -> None:
        communicator.duplicate("variable_9273")
        with pytest.raises(ConfigError, match=r"'variable_9273 \(1\)' and .* Rename one"):
            communicator.duplicate("variable_110963")

    spawn_inproc(2, work)


def test_a_communicator_is_a_context_that_tells_of_errors(spawn: Spawn) -> None:
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


# --- the same facts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"dense/kernel": "[3, 4] float32", "": "x"},
        {"a note": "two\nlines\tand a tab\u2028", "equation": "a=b"},
    ],
    ids=["none", "some", "with-line-breaks"],
)
def test_same_facts_in_another_order(spawn: Spawn, facts: dict[str, str]) -> None:
    def work(communicator: Communicator) -> None:
        items = list(facts.items())
        order = items if communicator.rank else items[::-1]
        names = communicator.check_same(dict(order), "the notes")
        assert names == list(facts)[::-1]  # as rank 0 has them

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
def test_other_facts_are_named_with_both_ranks(
    spawn: Spawn, other: dict[str, str], named: list[str]
) -> None:
    facts = {"a": "[3] float32", "b": "[2] float32"}

    def work(communicator: Communicator) -> HostOptError:
        mine = other if communicator.rank == 2 else facts
        with pytest.raises(CollectiveMismatchError) as caught:
            communicator.check_same(mine, "the gradients to reduce")
        return caught.value

    for error in spawn(3, work):
        for words in ["the gradients to reduce", "rank 0", "rank 2", *named]:
            assert words in str(error)
        assert "'a'" not in str(error)
        assert error.rank == 2
        assert error.task in ("worker:1", "worker:2")


def test_every_fact_that_differs_is_named_with_the_values_of_all_ranks(
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


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", ["i1", "u1", "u8", "?", "c8", "S3", "M8[s]", "O"])
def test_other_dtypes_cannot_be_reduced(spawn_inproc: Spawn, size: int, dtype: str) -> None:
    def work(communicator: Communicator) -> None:
        mine = np.zeros(5, dtype)
        for reduce in (communicator.all_reduce, communicator.reduce_scatter):
            with pytest.raises(ConfigError, match=r"float16, bfloat16.*int64") as caught:
                reduce(mine)
            assert f"dtype {mine.dtype.name} " in str(caught.value)

    spawn_inproc(size, work)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", ["i4", "i8"])
def test_whole_numbers_have_no_average(spawn_inproc: Spawn, size: int, dtype: str) -> None:
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


@pytest.mark.parametrize("size", [1, 2, 3])
def test_finish_of_all_and_new_work_after_it(spawn: Spawn, size: int) -> None:
    def work(communicator: Communicator) -> None:
        for _ in range(10):
            mine = np.array([communicator.rank + 1.0])
            assert communicator.all_reduce(mine)[0] == size * (size + 1) / 2
            communicator.finish()

    spawn(size, work)


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_waits_for_one_that_has_finished(spawn: Spawn, size: int) -> None:
    def work(communicator: Communicator) -> HostOptError:
        communicator.barrier()
        if communicator.rank == 0:
            return failure(communicator, communicator.finish)
        return failure(communicator, lambda: communicator.all_reduce(np.ones(9), what="step 7"))

    errors = spawn(size, work)
    # who receives from rank 0 finds it, and the others hear it from there
    for error in errors:
        assert isinstance(error, PeerLostError)
        assert error.rank == 0
        assert "rank 0" in str(error)
        assert "finished" in str(error)
        assert re.search(r"rank [1-9] waited for step 7", str(error))


def test_a_rank_that_finishes_twice_while_the_other_goes_on(spawn_inproc: Spawn) -> None:
    said_again = threading.Event()

    def work(communicator: Communicator) -> HostOptError:
        mailbox = communicator.transport.mailbox
        if communicator.rank == 0:
            send = communicator.transport.send

            async def send_and_say(*message: Any) -> None:
                await send(*message)
                said_again.set()

            communicator.finish()
            communicator.transport.send = send_and_say  # type: ignore[method-assign]
            return failure(communicator, communicator.finish)
        resume = mailbox.resume

        def late_resume(*step: int) -> None:
            assert said_again.wait(30)
            resume(*step)

        mailbox.resume = late_resume  # type: ignore[method-assign]
        communicator.finish()
        return failure(communicator, lambda: communicator.all_reduce(np.ones(9)))

    for error in spawn_inproc(2, work):
        assert isinstance(error, PeerLostError)
        assert error.rank == 0


def test_a_marker_that_is_slower_than_the_end_it_speaks_of(spawn_inproc: Spawn) -> None:
    together = threading.Barrier(3)

    def work(communicator: Communicator) -> float:
        send = communicator.transport.send
        late: list[Any] = []

        async def hold_the_marker(peer: int, tag: Tag, *rest: Any) -> None:
            if tag.is_finish_marker:
                late.append((peer, tag, *rest))
            else:
                await send(peer, tag, *rest)

        communicator.transport.send = hold_the_marker  # type: ignore[method-assign]
        communicator.finish()
        for message in late:
            event_loop.run(send(*message))
        together.wait(30)
        mailbox, previous = communicator.transport.mailbox, (communicator.rank - 1) % 3
        with mailbox.waiting(previous, Tag(0, 1), "new work") as check:
            left_s = check()
        together.wait(30)  # a rank that left would be another reason to give up
        return left_s

    assert all(left_s > 0 for left_s in spawn_inproc(3, work))


def test_a_rank_that_waits_for_one_that_has_closed(spawn: Spawn) -> None:
    def work(communicator: Communicator) -> HostOptError | None:
        communicator.barrier()
        if communicator.rank == 0:
            return None
        return failure(communicator, lambda: communicator.broadcast(np.ones(3), what="weights"))

    for rank, error in enumerate(spawn(3, work)[1:], start=1):
        assert isinstance(error, PeerLostError), rank
        assert error.rank == 0
        assert "rank 0" in str(error)


# --- waiting in vain --------------------------------------------------------------------------


def test_a_timeout_names_who_waits_for_whom_and_what(
    spawn: Spawn, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()

    def work(communicator: Communicator) -> HostOptError | None:
        communicator.barrier()
        if communicator.rank == 1:
            assert done.wait(30)  # alive, and busy with something else
            return None
        mine, operation = np.ones(9), Operation(communicator.channel, 1, 3, "'dense/kernel'")
        with pytest.raises(CollectiveTimeoutError) as caught:
            communicator.all_reduce_in_place(mine, ReduceOp.SUM, operation)
        done.set()
        assert caught.value.address == communicator.transport.cluster.ring[1].address
        return caught.value

    with caplog.at_level(logging.WARNING, "hostopt"):
        error, _ = spawn(2, work, stall_warning_s=0.4, collective_timeout_s=1.4)
    assert (error.rank, error.step, error.bucket) == (1, 1, 3)
    assert error.task in ("worker:0", "worker:1")
    wanted = ["rank 0", "rank 1", error.task, error.address, "step 1", "bucket 3", "dense/kernel"]
    for words in [*wanted, "collective_timeout_s"]:
        assert words in str(error)
    said = [r.getMessage() for r in caplog.records if r.name == "hostopt.transport.base"]
    warnings = [line for line in said if "dense/kernel" in line]  # a slow barrier may warn too
    assert len(warnings) == 2  # after 0.4 s and after 0.8 s
    for words in wanted:
        assert all(words in warning for warning in warnings)


def test_no_false_alarm(spawn: Spawn, caplog: pytest.LogCaptureFixture) -> None:
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


def test_a_rank_that_heard_of_an_error_first_leaves_with_that_error() -> None:
    transports = InprocTransport.connect(3)
    error = PeerLostError("rank 0 stopped: of the user", rank=0)
    transports[1].mailbox.fail(error)
    transports[1].close()
    assert transports[2].error is error
