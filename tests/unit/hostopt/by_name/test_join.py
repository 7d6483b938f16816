"""Ranks that join: neutral values, order, the rank that joins last, and errors."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rings import Spawn
from threads import in_threads

from hostopt.by_name.join import Joining
from hostopt.by_name.named import NamedCollectives
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.reduce_op import DTYPES, ReduceOp
from hostopt.errors import CollectiveMismatchError, ConfigError, HostOptError, PeerLostError

ALL_DTYPES = [np.dtype(getattr(ml_dtypes, name, name)) for name in DTYPES]
REFERENCE = {
    ReduceOp.SUM: lambda each, size: sum(each[1:], each[0]),
    ReduceOp.AVERAGE: lambda each, size: sum(each[1:], each[0]) / each[0].dtype.type(size),
    ReduceOp.MIN: lambda each, size: np.min(each, 0),
    ReduceOp.MAX: lambda each, size: np.max(each, 0),
    ReduceOp.PRODUCT: lambda each, size: np.prod(each, 0, dtype=each[0].dtype),
}


def values(rank: int, shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> Any:
    """Small integers, whose sums and products are exact in every dtype."""
    return np.random.default_rng([rank, seed]).integers(1, 4, shape).astype(dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_of_uneven_numbers_of_calls(spawn: Spawn, size: int) -> None:
    """Rank r makes 3r calls; joined ranks count as zeros. Then all do it once more."""

    def work(communicator: Communicator) -> list[int]:
        named = NamedCollectives(communicator)
        last = []
        for epoch in range(2):
            for step in range(3 * named.rank):
                result = named.all_reduce([values(named.rank, (9,), seed=step)], "x")[0]
                active = [rank for rank in range(size) if step < 3 * rank]
                expected = sum(values(rank, (9,), seed=step) for rank in active)
                assert np.array_equal(result, expected), (epoch, step)
            last.append(named.joining.join())
            total = named.all_reduce([np.ones(2)], "x")[0]
            assert total.tolist() == [size, size]
        return last

    assert spawn(size, work) == [[size - 1] * 2] * size


def test_every_collective_with_a_joined_rank(spawn: Spawn) -> None:
    """Ranks 0 and 2 make one call of each kind while rank 1 has joined."""
    active, shape = [0, 2], (7, 2)

    def work(communicator: Communicator) -> int:
        named = NamedCollectives(communicator)
        if named.rank == 1:
            return named.joining.join()
        for op in ReduceOp:
            dtypes = [d for d in ALL_DTYPES if op is not ReduceOp.AVERAGE or d.kind not in "iu"]
            arrays = [values(named.rank, shape, dtype) for dtype in dtypes]
            for dtype, result in zip(dtypes, named.all_reduce(arrays, f"all {op}", op)):
                each = [values(rank, shape, dtype) for rank in active]
                assert np.array_equal(result, REFERENCE[op](each, 3)), (op, dtype)
                assert result.dtype == dtype
        average = named.all_reduce([values(named.rank, shape)], "fp16", ReduceOp.AVERAGE, "fp16")
        each = [values(rank, shape) for rank in active]
        np.testing.assert_allclose(average[0], sum(each) / 3, rtol=1e-3)
        for dtype in [*ALL_DTYPES, np.dtype(bool), np.dtype(np.complex64)]:
            gathered = named.all_gather(values(named.rank, (named.rank, 2), dtype), "rows")
            assert np.array_equal(gathered, values(2, (2, 2), dtype))
        counts = named.all_gather(np.full(1, 5 + named.rank), "counts", [1, 1, 1])
        assert counts.tolist() == [5, 0, 7]
        for arrays in [[values(named.rank, shape)], [values(named.rank, (3,), d) for d in "fd"]]:
            for root in active:
                results = named.broadcast(arrays, root, f"{len(arrays)} arrays")
                for result in results:
                    assert np.array_equal(result, values(root, result.shape, result.dtype))
        part = named.reduce_scatter(values(named.rank, shape), "rows of sums")
        assert np.array_equal(part, np.array_split(sum(each), 3)[named.rank])
        named.barrier("barrier")
        return named.joining.join()

    last = spawn(3, work)
    assert last in ([0] * 3, [2] * 3)


@pytest.mark.parametrize("size", [3, 4])
def test_names_in_any_order_from_several_threads(spawn: Spawn, size: int) -> None:
    names = [f"tensor {number}" for number in range(8)]

    def work(communicator: Communicator) -> int:
        named = NamedCollectives(communicator)

        def reduce(name: str) -> None:
            for step in range(2 * named.rank):
                result = named.all_reduce([values(named.rank, (5,), seed=step)], name)[0]
                active = [rank for rank in range(size) if step < 2 * rank]
                assert np.array_equal(
                    result, sum(values(rank, (5,), seed=step) for rank in active)
                )
            if named.rank == size - 1:
                named.broadcast([np.ones(3)], named.rank, f"{name}, broadcast")
            else:
                done.append(name)

        done: list[str] = []
        shuffled = np.random.default_rng(named.rank).permutation(names)
        in_threads(reduce, map(str, shuffled))
        return named.joining.join()

    assert spawn(size, work) == [size - 1] * size


def test_the_last_rank_if_messages_are_overtaken(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 0 and 1 join, then 2, then 3, which learns of 0 and 1 only after that."""
    receive = Joining._receive
    overtaken = []

    def receive_late(self: Joining, peer: int, payload: memoryview) -> None:
        if self._transport.rank == 3 and peer < 2:
            overtaken.append((peer, bytes(payload)))
        else:
            receive(self, peer, payload)

    monkeypatch.setattr(Joining, "_receive", receive_late)

    def work(communicator: Communicator) -> int:
        joining = NamedCollectives(communicator).joining

        def deliver() -> None:
            while not joining._is_joined or len(overtaken) < 2:
                pass
            for peer, payload in overtaken:
                receive(joining, peer, memoryview(payload))

        before: set[int] = {2: {0, 1}, 3: {2}}.get(communicator.rank, set())
        while not before <= joining._joined.get(0, set()):
            pass
        if communicator.rank == 3:
            threading.Thread(target=deliver, daemon=True).start()
        return joining.join()

    assert spawn(4, work) == [3] * 4


def test_a_rank_joins_while_others_are_in_calls(spawn: Spawn) -> None:
    """Ranks 0 and 2 wait in two calls each, which rank 1 learns of when it joins."""

    def work(communicator: Communicator) -> Any:
        named = NamedCollectives(communicator)
        if named.rank == 1:
            named.barrier("begin")
            return named.joining.join()
        results: dict[str, Any] = {}

        def reduce(name: str) -> None:
            results[name] = named.all_reduce([np.full(2, 1.0 + named.rank)], name)[0].tolist()

        threads = [threading.Thread(target=reduce, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        while not {"a", "b"} <= {name for _, name in named.joining._in_progress} | {*results}:
            pass
        named.barrier("begin")
        for thread in threads:
            thread.join()
        assert results == {"a": [4, 4], "b": [4, 4]}
        return named.joining.join()

    last = spawn(3, work)
    assert last in ([0] * 3, [2] * 3)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda n: n.all_to_all(np.ones(2), [1, 1], "x"), "all_to_all"),
        (lambda n: n.all_gather_bytes(b"", "x"), "all_gather_bytes"),
        (lambda n: n.broadcast([np.ones(2)], 1, "x"), "broadcast"),
    ],
)
def test_calls_that_need_the_joined_rank(spawn_ring: Spawn, call: Any, text: str) -> None:
    errors: list[HostOptError] = []

    def work(communicator: Communicator) -> None:
        named = NamedCollectives(communicator)
        with pytest.raises(CollectiveMismatchError) as caught:
            call(named) if named.rank == 0 else named.joining.join()
        errors.append(caught.value)

    spawn_ring(2, work)
    for error in errors:
        for part in ["rank 0", f"calls {text} of 'x'", "rank 1", "has joined"]:
            assert part in str(error)
    assert len(errors) == 2


def test_a_call_and_join_at_the_same_time_on_one_rank(spawn_inproc: Spawn) -> None:
    def work(communicator: Communicator) -> Any:
        named = NamedCollectives(communicator)
        if named.rank == 1:
            named.barrier("go")
            named.barrier("x")
            return named.joining.join()
        waiting = threading.Thread(target=named.barrier, args=("x",))
        waiting.start()
        while not named.joining._in_progress:
            pass
        with pytest.raises(ConfigError, match="another of its threads is in the call 'x'"):
            named.joining.join()
        named.barrier("go")
        waiting.join()
        return named.joining.join()

    first, second = spawn_inproc(2, work)
    assert first == second


def test_a_rank_that_leaves_without_joining(spawn_ring: Spawn) -> None:
    def work(communicator: Communicator) -> None:
        named = NamedCollectives(communicator)
        named.barrier("begin")
        if named.rank == 1:
            with pytest.raises(PeerLostError, match=r"rank 0 .*has left.*join\(\) on all ranks"):
                named.joining.join()

    spawn_ring(2, work)
