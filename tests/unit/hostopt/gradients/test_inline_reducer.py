"""InlineReducer: sums in shared memory are right, and are kept while a rank holds them."""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rings import Spawn

from hostopt.collectives import shared_file
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.host_memory import BLOCK_BYTES
from hostopt.collectives.shared_memory import channel_bytes
from hostopt.errors import PeerLostError
from hostopt.gradients.bucket import TensorSpec, plan_buckets
from hostopt.gradients.nonfinite import NonFiniteCheck
from hostopt.gradients.reducer import InlineReducer
from hostopt.gradients.step_stats import StepTimes

SHAPES = [(3,), (2, 50_000), (), (700, 700)]  # blocks of one, and of several
BUCKETS = plan_buckets(
    [TensorSpec(f"v{i}", shape, np.dtype("f4")) for i, shape in enumerate(SHAPES)], 1 << 20
)
STEPS = 5


def gradients(rank: int, step: int, number: int) -> list[Any]:
    random = np.random.default_rng([rank, step, number])
    # magnitudes that differ, so that the order of additions shows in the bits
    return [
        np.asarray(random.standard_normal(spec.shape) * 10.0 ** random.integers(0, 4), np.float32)
        for spec in BUCKETS[number].specs
    ]


def expected_sums(size: int, step: int, number: int) -> list[Any]:
    parts = zip(*(gradients(rank, step, number) for rank in range(size)))
    return [np.asarray(reduce(np.add, part)) for part in parts]


def check(result: list[Any], size: int, step: int, number: int) -> None:
    for sums, right in zip(result, expected_sums(size, step, number)):
        np.testing.assert_array_equal(sums, right, strict=True)


@pytest.fixture
def spawn_shm() -> Spawn:
    return Spawn("shm")


def test_the_plan_has_two_buckets() -> None:
    assert [bucket.indices for bucket in BUCKETS] == [(3,), (2, 1, 0)]


@pytest.mark.parametrize("size", [2, 3])
def test_sums_in_rank_order(spawn_shm: Spawn, size: int) -> None:
    def work(communicator: Communicator) -> None:
        reducer = InlineReducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        for step in range(STEPS):
            for number in range(len(BUCKETS)):
                check(
                    reducer.reduce(number, gradients(communicator.rank, step, number)),
                    size,
                    step,
                    number,
                )
        reducer.close()

    spawn_shm(size, work)


def test_steps_that_leave_out_the_last_buckets(spawn_shm: Spawn) -> None:
    counts = [1, len(BUCKETS), 1, len(BUCKETS)]

    def work(communicator: Communicator) -> StepTimes | None:
        reducer = InlineReducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        for step, count in enumerate(counts):
            for number in range(count):
                arrays = gradients(communicator.rank, step, number)
                check(reducer.reduce(number, arrays), 2, step, number)
        reducer.close()
        return reducer.stats.last

    for times in spawn_shm(2, work):
        assert times is not None
        assert times.step == len(counts) - 1


def test_sums_held_by_one_rank_are_not_overwritten(spawn_shm: Spawn) -> None:
    def work(communicator: Communicator) -> None:
        reducer = InlineReducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        held = []
        for step in range(STEPS):
            for number in range(len(BUCKETS)):
                sums = reducer.reduce(number, gradients(communicator.rank, step, number))
                if step % 2 == communicator.rank:  # never both
                    held.append((sums, 2, step, number))
        reducer.close()
        communicator.barrier()
        for attributes in held:
            check(*attributes)

    spawn_shm(2, work)


def test_released_sums_reuse_their_memory(spawn_shm: Spawn) -> None:
    def work(communicator: Communicator) -> None:
        reducer = InlineReducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        addresses = set()
        for step in range(STEPS):
            sums = reducer.reduce(0, gradients(communicator.rank, step, 0))
            addresses.add(sums[0].ctypes.data)
            del sums
        assert len(addresses) == 1

    spawn_shm(2, work)


def test_sums_that_other_ranks_read_cannot_be_changed(spawn_shm: Spawn) -> None:
    def work(communicator: Communicator) -> None:
        reducer = InlineReducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        sums = reducer.reduce(1, gradients(communicator.rank, 0, 1))
        with pytest.raises(ValueError, match="read-only"):
            sums[0] += 1

    spawn_shm(2, work)


def test_without_memory_for_shared_sums_each_rank_allocates_local_sums(
    spawn_shm: Spawn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened: list[int] = []
    create = shared_file.create

    def create_small(nbytes: int) -> Any:
        """Provides memory for channels, and for one slot of bucket 0."""
        opened.append(nbytes)
        if opened.count(BUCKETS[0].buffer_bytes) > 1:
            raise OSError(28, "No space left on device")
        return create(nbytes)

    monkeypatch.setattr(shared_file, "create", create_small)

    def work(communicator: Communicator) -> None:
        reducer = InlineReducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        held = [
            (reducer.reduce(0, gradients(communicator.rank, step, 0)), 2, step, 0)
            for step in range(STEPS)
        ]
        for attributes in held:
            check(*attributes)

    spawn_shm(2, work)
    assert opened.count(BUCKETS[0].buffer_bytes) == 2  # one more request, and no further one
    assert "No space left on device" in caplog.text


def test_a_rank_that_fails_ends_the_reduction_of_the_others(spawn_shm: Spawn) -> None:
    def work(communicator: Communicator) -> None:
        reducer = InlineReducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        reducer.reduce(0, gradients(communicator.rank, 0, 0))
        if communicator.rank == 1:
            communicator.abort(ValueError("no more flour"))
            return
        reducer.reduce(0, gradients(communicator.rank, 1, 0))

    with pytest.raises(PeerLostError, match="no more flour") as caught:
        spawn_shm(3, work)
    assert caught.value.rank == 1


def test_a_closed_reducer_frees_its_memory(spawn_shm: Spawn) -> None:
    """Each rank maps the staging buffers of the sums, although cycles may keep the reducer."""

    def mapped_bytes() -> int:
        maps = re.findall(r"^(\w+)-(\w+) .*hostopt", Path("/proc/self/maps").read_text(), re.M)
        return sum(int(end, 16) - int(start, 16) for start, end in maps)

    def work(communicator: Communicator) -> int:
        reducer = InlineReducer(communicator, BUCKETS, NonFiniteCheck(communicator))
        reducer.reduce(0, gradients(communicator.rank, 0, 0))
        communicator.barrier()
        before = mapped_bytes()
        communicator.barrier()
        reducer.close()
        communicator.barrier()
        return before - mapped_bytes()

    assert min(spawn_shm(2, work)) >= 2 * channel_bytes(2, BLOCK_BYTES)
