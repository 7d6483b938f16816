"""Ranks that make different calls: all of them raise an error that names both calls and ranks."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rings import Spawn
from threads import in_threads

from hostopt.collectives.communicator import Communicator
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.errors import CollectiveMismatchError, PeerLostError
from hostopt.gradients.bucket import TensorSpec, plan_buckets
from hostopt.gradients.nonfinite import NonFiniteCheck
from hostopt.gradients.reducer import Reducer
from hostopt.transport import stall
from hostopt.transport.message import signature_of

Call = Callable[..., Any]  # of a communicator


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares calls soon."""
    monkeypatch.setattr(stall, "_COMPARE_AFTER_S", 0.005)


def f32(*shape: int) -> np.ndarray[Any, Any]:
    return np.ones(shape, np.float32)


def shown(communicator: Communicator, rank: int) -> str:
    return f"rank {rank} ({communicator.transport.cluster.ring[rank]})"


def disagree(spawn: Spawn, calls: list[Call], texts: list[str], **options: Any) -> None:
    """Checks that all ranks raise the same error, which names all calls."""
    met = threading.Barrier(len(calls))

    def work(communicator: Communicator) -> str:
        communicator.all_reduce(f32(3), name="the start")
        met.wait(30)  # what one rank has yet to say would be an error of its own
        with pytest.raises(CollectiveMismatchError) as caught:
            calls[communicator.rank](communicator)
        for rank, text in enumerate(texts):
            if text not in texts[:rank]:
                assert f"{shown(communicator, rank)} calls {text}" in str(caught.value)
        assert "Call the collectives in the same order" in str(caught.value)
        assert caught.value.rank == next(r for r, text in enumerate(texts) if text != texts[0])
        met.wait(30)
        return str(caught.value)

    assert len({*spawn(len(calls), work, **options)}) == 1


def kind(
    method: Call, text: str, name: str, *shape: int, dtype: str = "float32", **options: Any
) -> tuple[Call, str]:
    """A call with an array, and the text that describes it."""
    described = f"{text} of '{name}' {dtype}{list(shape)}"
    return lambda c: method(c, np.ones(shape, dtype), name=name, **options), described


REDUCE = Communicator.all_reduce, "all_reduce(sum)"
SCATTER = Communicator.reduce_scatter, "reduce_scatter(sum)"
GATHER = Communicator.all_gather, "all_gather"
BROADCAST = Communicator.broadcast, "broadcast from rank 0"
KINDS: dict[str, tuple[Call, str]] = {
    "reduce a": kind(*REDUCE, "a", 2),
    "reduce b": kind(*REDUCE, "b", 2),
    "reduce [2, 3]": kind(*REDUCE, "a", 2, 3),
    "reduce [3, 2]": kind(*REDUCE, "a", 3, 2),
    "reduce large": kind(*REDUCE, "large", 40_000),
    "reduce int32": kind(*REDUCE, "a", 2, dtype="int32"),
    "reduce max": kind(REDUCE[0], "all_reduce(max)", "a", 2, op=ReduceOp.MAX),
    "reduce none": kind(*REDUCE, "a", 0),
    "reduce one": kind(*REDUCE, "a", 1),
    "scatter none": kind(*SCATTER, "a", 0),
    "scatter one": kind(*SCATTER, "a", 1),
    "gather a": kind(*GATHER, "a", 2),
    "gather b": kind(*GATHER, "b", 2),
    "gather [2, 3]": kind(*GATHER, "a", 2, 3),
    "gather [3, 2]": kind(*GATHER, "a", 3, 2),
    "gather none": kind(*GATHER, "a", 0),
    "broadcast a": kind(*BROADCAST, "a", 2),
    "broadcast b": kind(*BROADCAST, "b", 2),
    "broadcast [2, 3]": kind(*BROADCAST, "a", 2, 3),
    "broadcast [3, 2]": kind(*BROADCAST, "a", 3, 2),
    "broadcast none": kind(*BROADCAST, "a", 0),
    "broadcast from 1": kind(BROADCAST[0], "broadcast from rank 1", "a", 2, root=1),
    "bytes a": (lambda c: c.all_gather_bytes(b"flour", "a"), "all_gather_bytes of 'a'"),
    "bytes b": (lambda c: c.all_gather_bytes(b"", "b"), "all_gather_bytes of 'b'"),
    "gather_bytes": (lambda c: c.gather_bytes(b"flour", "a"), "gather_bytes of 'a'"),
    "scatter_bytes": (lambda c: c.scatter_bytes([b"x"] * c.size, "a"), "scatter_bytes of 'a'"),
    "barrier": (lambda c: c.barrier("bread"), "barrier of 'bread'"),
}
PAIRS = [
    ("reduce a", "reduce b"),
    ("reduce [2, 3]", "reduce [3, 2]"),
    ("reduce a", "reduce large"),
    ("reduce a", "reduce int32"),
    ("reduce a", "reduce max"),
    ("reduce none", "reduce a"),
    ("reduce none", "reduce one"),
    ("scatter none", "scatter one"),
    ("gather a", "gather b"),
    ("gather [2, 3]", "gather [3, 2]"),
    ("gather none", "gather a"),
    ("broadcast a", "broadcast b"),
    ("broadcast [2, 3]", "broadcast [3, 2]"),
    ("broadcast none", "broadcast a"),
    ("broadcast a", "broadcast from 1"),
    ("reduce a", "broadcast a"),
    ("reduce a", "gather a"),
    ("reduce large", "broadcast from 1"),
    ("gather a", "broadcast a"),
    ("bytes a", "bytes b"),
    ("bytes a", "reduce a"),
    ("bytes a", "gather_bytes"),
    ("scatter_bytes", "gather_bytes"),
    ("reduce one", "barrier"),
]


# each pair in both orders and for both sizes, each order for one of them
CASES = [
    (*order, 2 + (number + swapped) % 2)
    for number, pair in enumerate(PAIRS)
    for swapped, order in enumerate((pair, pair[::-1]))
]


@pytest.mark.parametrize(("first", "second", "size"), CASES)
def test_all_ranks_name_both_calls(spawn: Spawn, first: str, second: str, size: int) -> None:
    names = [first] * (size - 1) + [second] if size == 2 else [first, second, first]
    calls = [KINDS[name][0] for name in names]
    disagree(spawn, calls, [KINDS[name][1] for name in names])


def test_three_different_calls_are_named(spawn: Spawn) -> None:
    names = ["reduce a", "reduce b", "broadcast a"]
    disagree(spawn, [KINDS[name][0] for name in names], [KINDS[name][1] for name in names])


@pytest.mark.parametrize("lengths", [(10, 20), (8, 16)])
def test_arrays_of_several_segments(spawn: Spawn, lengths: tuple[int, int]) -> None:
    # chunks of 16 and of 32 bytes: equal as far as the first segment goes
    calls = [lambda c: c.all_reduce(f32(lengths[c.rank]), name="the flour")] * 2
    texts = [f"all_reduce(sum) of 'the flour' float32[{length}]" for length in lengths]
    disagree(spawn, calls, texts, segment_bytes=16)


def test_tensors_in_different_order(spawn: Spawn) -> None:
    """The tensors have equal dtypes and lengths, and would be added crosswise."""

    def work(communicator: Communicator) -> str:
        names = ["one", "two"] if communicator.rank else ["two", "one"]
        with pytest.raises(CollectiveMismatchError) as caught:
            for name in names:
                communicator.all_reduce(f32(2), name=name)
        return str(caught.value)

    (text,) = {*spawn(2, work)}
    assert re.search(r"rank 0 \(.*of 'two' float32\[2\], rank 1 \(.*of 'one' float32\[2\]", text)


@pytest.mark.parametrize("size", [2, 3])
def test_named_duplicates_in_different_order(spawn: Spawn, size: int) -> None:
    def work(communicator: Communicator) -> dict[str, list[float]]:
        names = ["a", "b", "c"]
        if communicator.rank == 1:
            names.reverse()
        channels = {name: communicator.duplicate(name) for name in names}
        result: dict[str, list[float]] = {}

        def use(name: str, local: float) -> None:
            channel = channels[name]
            result[name] = [
                float(channel.all_reduce(np.full(2, local))[0]),
                float(channel.broadcast(np.full(2, local * channel.rank), size - 1)[0]),
                float(channel.all_gather(np.full(2, local))[0, 0]),
            ]

        in_threads(use, names, (10.0 ** "abc".index(name) for name in names))
        return result

    expected = {
        name: [size * 10.0**index, (size - 1) * 10.0**index, 10.0**index]
        for index, name in enumerate("abc")
    }
    assert spawn(size, work) == [expected] * size


def test_different_buckets(spawn_ring: Spawn) -> None:
    def work(communicator: Communicator) -> str:
        name = "bread" if communicator.rank else "flour"
        specs = [TensorSpec(name, (3,), np.dtype(np.float32))]
        buckets = plan_buckets(specs, 1 << 20)
        reducer = Reducer(communicator, buckets, NonFiniteCheck(communicator))
        with pytest.raises(CollectiveMismatchError) as caught:
            reducer.launch(0, [f32(3)])
            reducer.wait(0)
        reducer.close()
        return str(caught.value)

    (text,) = {*spawn_ring(2, work)}
    assert "calls all_reduce(sum) of the gradient of 'flour' (bucket 1/1) float32[16]" in text
    assert "calls all_reduce(sum) of the gradient of 'bread' (bucket 1/1) float32[16]" in text


def test_signature_text() -> None:
    float32 = np.dtype(np.float32)
    texts = [
        signature_of("all_reduce(sum)", "dense/kernel", float32, (2, 3), "fp16").text,
        signature_of("broadcast from rank 0", "variable 'a'", float32, ()).text,
        signature_of("all_gather", "", float32, (0,)).text,
    ]
    assert texts == [
        "all_reduce(sum) of 'dense/kernel' float32[2, 3] as fp16",
        "broadcast from rank 0 of variable 'a' float32[]",
        "all_gather float32[0]",
    ]


def test_an_error_whose_message_is_lost_is_found_by_a_rank_that_waits(spawn_ring: Spawn) -> None:
    met = threading.Barrier(2)

    def work(communicator: Communicator) -> None:
        communicator.all_reduce(f32(3), name="the start")
        met.wait(30)
        if communicator.rank == 0:
            communicator.transport.mailbox.fail(PeerLostError("no more flour"))  # tells nobody
        else:
            with pytest.raises(PeerLostError, match="no more flour"):
                communicator.all_reduce(f32(3))
        met.wait(30)

    spawn_ring(2, work, stall_warning_s=1000)
