"""Reducer: launches and waits in every order, errors and buffer reuse."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from rings import Spawn

from hostopt.collectives.communicator import Communicator
from hostopt.errors import ConfigError, HostOptError, PeerLostError
from hostopt.gradients.bucket import Bucket, TensorSpec, plan_buckets
from hostopt.gradients.nonfinite import NonFiniteCheck
from hostopt.gradients.reducer import Reducer
from hostopt.gradients.step_stats import StepTimes
from hostopt.transport.inproc import InprocTransport

SHAPES = [(3,), (2, 5), (), (40,)]
# three buckets: (3,), (2, 1), (0,)
BUCKETS = plan_buckets(
    [TensorSpec(f"v{i}", shape, np.dtype("f4")) for i, shape in enumerate(SHAPES)], 128
)


def gradients(rank: int, step: int, bucket: Bucket) -> list[Any]:
    return [
        np.array(np.random.default_rng([rank, step, i]).integers(-9, 9, SHAPES[i]), np.float32)
        for i in bucket.indices
    ]


def check_sums(result: list[Any], size: int, step: int, bucket: Bucket) -> None:
    for i, array in enumerate(result):
        stack = np.stack([gradients(rank, step, bucket)[i] for rank in range(size)])
        expected = np.asarray(stack.sum(axis=0), np.float32)
        np.testing.assert_array_equal(array, expected, strict=True)


def test_the_plan_of_these_tests() -> None:
    assert [bucket.indices for bucket in BUCKETS] == [(3,), (2, 1), (0,)]


@pytest.mark.parametrize("compression", [None, "bf16"])  # which has all these integers
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_of_several_steps(spawn: Spawn, size: int, compression: str | None) -> None:
    def work(communicator: Communicator) -> None:
        reducer = Reducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        for step in range(5):
            for number, bucket in enumerate(BUCKETS):
                reducer.launch(number, gradients(communicator.rank, step, bucket))
            for number, bucket in enumerate(BUCKETS):
                check_sums(reducer.wait(number), size, step, bucket)
        reducer.close()

    spawn(size, work, segment_bytes=16, compression=compression)


@pytest.mark.parametrize("compression", [None, "bf16"])
@pytest.mark.parametrize(
    ("transport", "size"), [("inproc", 1), ("inproc", 3), ("grpc", 2), ("hosts", 4), ("hosts", 6)]
)
def test_each_rank_gets_its_parts_of_the_sums(
    transport: str, size: int, compression: str | None
) -> None:
    shapes = [(100, 301), (3,), (7, 1), (20_000,)]
    specs = [TensorSpec(f"v{i}", shape, np.dtype("f4")) for i, shape in enumerate(shapes)]
    (bucket,) = plan_buckets(specs, 1 << 20, size)

    def work(communicator: Communicator) -> None:
        whole, parts = (
            Reducer(communicator, [bucket], NonFiniteCheck(communicator)) for _ in range(2)
        )
        assert parts.scatter(0)
        for step in range(3):
            rng = np.random.default_rng([communicator.rank, step])
            arrays = [rng.normal(size=spec.shape).astype(np.float32) for spec in bucket.specs]
            for reducer in (whole, parts):
                reducer.launch(0, arrays)
            sums = whole.wait(0)
            for total, own, part in zip(sums, parts.wait(0), bucket.parts[communicator.rank]):
                np.testing.assert_array_equal(own, total.reshape(-1)[part])
        for reducer in (whole, parts):
            reducer.close()

    Spawn(transport)(size, work, compression=compression)


def test_every_order_of_launches_and_waits(spawn: Spawn) -> None:
    size, orders = 2, list(itertools.permutations(range(len(BUCKETS))))

    def work(communicator: Communicator) -> None:
        reducer = Reducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        for step, order in enumerate(orders):
            # the ranks launch in different orders
            for number in order if communicator.rank else reversed(order):
                reducer.launch(number, gradients(communicator.rank, step, BUCKETS[number]))
            for number in orders[-step]:
                check_sums(reducer.wait(number), size, step, BUCKETS[number])
        reducer.close()

    spawn(size, work)


def test_steps_that_leave_out_the_last_buckets(spawn: Spawn) -> None:
    counts = [2, 1, len(BUCKETS), 1, 1, len(BUCKETS)]

    def work(communicator: Communicator) -> StepTimes | None:
        reducer = Reducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        for step, count in enumerate(counts):
            others = range(1, count)
            for number in [0, *(others if communicator.rank else reversed(others))]:
                reducer.launch(number, gradients(communicator.rank, step, BUCKETS[number]))
            for number in range(count):
                check_sums(reducer.wait(number), 2, step, BUCKETS[number])
        reducer.close()
        return reducer.stats.last

    for times in spawn(2, work):
        assert times is not None
        assert times.step == len(counts) - 1


def test_waits_before_launches_from_other_threads(spawn: Spawn) -> None:
    def work(communicator: Communicator) -> None:
        reducer = Reducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        result: dict[int, list[Any]] = {}
        waits = [
            threading.Thread(target=lambda n=number: result.update({n: reducer.wait(n)}))
            for number in range(len(BUCKETS))
        ]
        for thread in waits:
            thread.start()
        for number, bucket in enumerate(BUCKETS):
            reducer.launch(number, gradients(communicator.rank, 0, bucket))
        for thread in waits:
            thread.join()
        for number, bucket in enumerate(BUCKETS):
            check_sums(result[number], 3, 0, bucket)
        reducer.close()

    spawn(3, work)


def test_two_reducers_at_the_same_time(spawn: Spawn) -> None:
    size = 3

    def work(communicator: Communicator) -> None:
        check = NonFiniteCheck(communicator)
        reducers = [Reducer(communicator, BUCKETS, check) for _ in range(2)]
        launches = list(itertools.product(range(2), range(len(BUCKETS))))
        for step in range(4):
            # rank r begins in another place, so that the two never come in the same order
            for which, number in launches[communicator.rank * 2 :][::-1]:
                arrays = gradients(communicator.rank, 10 * step + which, BUCKETS[number])
                reducers[which].launch(number, arrays)
            for which, number in launches[: communicator.rank * 2]:
                arrays = gradients(communicator.rank, 10 * step + which, BUCKETS[number])
                reducers[which].launch(number, arrays)
            for which, number in launches:
                result = reducers[which].wait(number)
                check_sums(result, size, 10 * step + which, BUCKETS[number])
        for reducer in reducers:
            reducer.close()

    spawn(size, work, segment_bytes=16)


def test_a_referenced_result_is_never_overwritten(spawn: Spawn) -> None:
    size, steps = 2, 6

    def work(communicator: Communicator) -> None:
        reducer = Reducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        held = []
        for step in range(steps):
            for number, bucket in enumerate(BUCKETS):
                reducer.launch(number, gradients(communicator.rank, step, bucket))
            results = [reducer.wait(number) for number in range(len(BUCKETS))]
            if step % 2 == 0:
                held.append((step, results))
        for step, results in held:
            for result, bucket in zip(results, BUCKETS):
                check_sums(result, size, step, bucket)
        reducer.close()

    spawn(size, work)


def test_gradients_may_be_modified_after_launch_returns(spawn: Spawn) -> None:
    def work(communicator: Communicator) -> None:
        reducer = Reducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        for number, bucket in reversed(list(enumerate(BUCKETS))):
            arrays = gradients(communicator.rank, 0, bucket)
            reducer.launch(number, arrays)
            for array in arrays:
                array[...] = 1e6
        for number, bucket in enumerate(BUCKETS):
            check_sums(reducer.wait(number), 2, 0, bucket)
        reducer.close()

    spawn(2, work)


# --- what goes wrong --------------------------------------------------------------------------


def test_a_second_launch_in_one_step_is_refused() -> None:
    communicator = Communicator(InprocTransport.connect(1)[0])
    reducer = Reducer(communicator, BUCKETS, NonFiniteCheck(communicator))
    reducer.launch(1, gradients(0, 0, BUCKETS[1]))  # waits for bucket 0
    with pytest.raises(ConfigError, match=r"bucket 1 \(.*'v2'.*launched twice") as caught:
        reducer.launch(1, gradients(0, 0, BUCKETS[1]))
    assert caught.value.bucket == 1
    reducer.close()


def test_a_second_launch_of_a_reduced_bucket_is_refused() -> None:
    communicator = Communicator(InprocTransport.connect(1)[0])
    reducer = Reducer(communicator, BUCKETS, NonFiniteCheck(communicator))
    reducer.launch(0, gradients(0, 0, BUCKETS[0]))
    reducer.launch(1, gradients(0, 0, BUCKETS[1]))
    check_sums(reducer.wait(1), 1, 0, BUCKETS[1])  # so bucket 0 is reduced, and not yet fetched
    with pytest.raises(ConfigError, match="launched twice"):
        reducer.launch(0, gradients(0, 1, BUCKETS[0]))
    reducer.close()


def test_a_closed_reducer_refuses_launches_and_ends_waits(spawn: Spawn) -> None:
    def work(communicator: Communicator) -> None:
        before = threading.active_count()
        reducer = Reducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                reducer.wait(0)
            except BaseException as error:
                raised.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        reducer.close()
        waiting.join()
        with pytest.raises(HostOptError, match="closed"):
            reducer.launch(0, gradients(0, 0, BUCKETS[0]))
        with pytest.raises(HostOptError, match="closed"):
            reducer.wait(0)
        assert [type(error) for error in raised] == [PeerLostError]
        assert threading.active_count() <= before

    spawn(1, work)


def test_an_error_of_the_ring_is_raised_by_every_wait(spawn: Spawn) -> None:
    all_done = threading.Barrier(3)

    def work(communicator: Communicator) -> HostOptError:
        reducer = Reducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        reducer.launch(0, gradients(communicator.rank, 0, BUCKETS[0]))
        reducer.wait(0)
        all_done.wait(30)
        if communicator.rank == 1:
            communicator.abort(ValueError("no more flour"))
        with pytest.raises(PeerLostError):
            # the ring may fail before the last launch
            for number in (1, 2):
                reducer.launch(number, gradients(communicator.rank, 0, BUCKETS[number]))
            reducer.wait(2)
        with pytest.raises(PeerLostError) as caught:
            reducer.wait(1)
        with pytest.raises(PeerLostError):
            reducer.launch(0, gradients(communicator.rank, 1, BUCKETS[0]))
        reducer.close()
        return caught.value

    for error in spawn(3, work):
        assert error.rank == 1
        assert error.root_cause == "ValueError: no more flour"
        assert "rank 1" in str(error)
        assert "no more flour" in str(error)


def test_an_error_of_the_ring_is_raised_by_a_wait_behind_an_unlaunched_bucket(
    spawn: Spawn,
) -> None:
    all_launched = threading.Barrier(2)

    def work(communicator: Communicator) -> None:
        reducer = Reducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        reducer.launch(1, gradients(communicator.rank, 0, BUCKETS[1]))
        all_launched.wait(30)
        if communicator.rank == 1:
            communicator.abort(ValueError("no more flour"))
        # bucket 0 is still computed
        with pytest.raises(PeerLostError, match="no more flour"):
            reducer.wait(1)
        reducer.close()

    spawn(2, work)


def test_an_error_of_one_reducer_is_raised_by_all(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no more flour")

    def work(communicator: Communicator) -> int | None:
        reducer = Reducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        if communicator.rank == 1:
            monkeypatch.setattr(reducer.communicator, "all_reduce_in_place", fail)
        error = MemoryError if communicator.rank == 1 else PeerLostError
        with pytest.raises(error, match="no more flour") as caught:
            reducer.launch(0, gradients(communicator.rank, 0, BUCKETS[0]))  # rank 1 may be faster
            reducer.wait(0)
        reducer.close()
        return getattr(caught.value, "rank", None)

    assert spawn(2, work) == [1, None]


def test_a_closed_reducer_is_free() -> None:
    communicator = Communicator(InprocTransport.connect(1)[0])
    for _ in range(3):  # rings live longer than the graphs that reduce over them
        reducer = Reducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        left = weakref.ref(reducer)
        reducer.close()
        del reducer
        gc.collect()
        assert left() is None
