"""NonFiniteCheck on every transport: all ranks name the same bucket and the same ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from rings import Spawn

from hostopt.collectives.communicator import Communicator
from hostopt.collectives.host_memory import HostMemory
from hostopt.errors import NonFiniteGradientError
from hostopt.gradients.bucket import TensorSpec, plan_buckets
from hostopt.gradients.nonfinite import ALLOW, NonFiniteCheck, find_nonfinite
from hostopt.gradients.reducer import InlineReducer, open_reducer

NAN, INF = float("nan"), float("inf")
LARGEST = float(np.finfo(np.float32).max)
SHAPES = [(3,), (2, 5), (), (40,)]
# three buckets: v3; v2 and v1; v0
BUCKETS = plan_buckets(
    [TensorSpec(f"v{i}", shape, np.dtype("f4")) for i, shape in enumerate(SHAPES)], 128
)
Change = tuple[int, str, float]  # rank, variable and a value in its gradient


@pytest.fixture
def spawn_shm() -> Spawn:
    return Spawn("shm")


class Sums:
    """Runs one reducer on one rank, as a graph does."""

    def __init__(self, communicator: Communicator, check: NonFiniteCheck | None = None) -> None:
        self._rank = communicator.rank
        self._reducer = open_reducer(communicator, BUCKETS, check)

    def step(self, *changes: Change) -> dict[str, Any]:
        """Returns sums by variable; gradients equal the rank number, except `changes`."""
        gradients = {f"v{i}": np.full(s, self._rank, np.float32) for i, s in enumerate(SHAPES)}
        for rank, name, value in changes:
            if rank == self._rank:
                gradients[name].reshape(-1)[-1] = value
        arrays = [[gradients[name] for name in bucket.names] for bucket in BUCKETS]
        sums: dict[str, Any] = {}
        if isinstance(self._reducer, InlineReducer):
            for number, bucket in enumerate(BUCKETS):
                sums.update(zip(bucket.names, self._reducer.reduce(number, arrays[number])))
            return sums
        for number in range(len(BUCKETS)):
            self._reducer.launch(number, arrays[number])
        for number, bucket in enumerate(BUCKETS):
            sums.update(zip(bucket.names, self._reducer.wait(number)))
        return sums

    def close(self) -> None:
        self._reducer.close()


def test_a_nan_among_infinities_is_named() -> None:
    arrays = [np.array([1.0, INF]), np.array([INF, NAN]), np.array(2.0), np.array([[-INF]])]
    assert find_nonfinite(list("abcd"), arrays) == {"a": "Inf", "b": "NaN", "d": "Inf"}


# -- error ---------------------------------------------------------------------------------


def errors_of(
    spawn: Spawn, size: int, changes: Sequence[Change], **options: Any
) -> list[NonFiniteGradientError]:
    """Returns the error of each rank, in the second step."""

    def work(communicator: Communicator) -> NonFiniteGradientError:
        sums = Sums(communicator)
        assert (sums.step()["v1"] == sum(range(size))).all()
        with pytest.raises(NonFiniteGradientError) as caught:
            sums.step(*changes)
        sums.close()
        return caught.value

    errors = spawn(size, work, **options)
    assert len({str(error) for error in errors}) == 1
    return errors


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("where", [0, -1])
def test_ranks_with_parts_of_the_sums_raise_the_same_error(
    spawn_ring: Spawn, size: int, where: int
) -> None:
    specs = [TensorSpec("large", (30_000,), np.dtype("f4")), TensorSpec("v", (7,), np.dtype("f4"))]

    def work(communicator: Communicator, bad: float, last: int) -> str:
        reducer = open_reducer(communicator, plan_buckets(specs, 1 << 20, size))
        assert reducer.scatter(0)

        def step(value: float) -> int:
            large = np.ones(30_000, np.float32)
            if communicator.rank <= last:
                large[where] = value
            reducer.launch(0, [np.ones(7, np.float32), large])
            return sum(part.size for part in reducer.wait(0))

        for value in (1.0, LARGEST / 4):  # a large sum need not be infinite
            assert step(value) < 30_007 * 0.6
        with pytest.raises(NonFiniteGradientError) as caught:
            step(bad)
        reducer.close()
        return str(caught.value)

    (text,) = {*spawn_ring(size, lambda each: work(each, NAN, 0))}
    assert "rank 0 (" in text
    assert "has NaN for 'large'" in text
    (text,) = {*spawn_ring(size, lambda each: work(each, LARGEST, size))}
    assert "their sum has overflowed: Inf for 'large'" in text


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("bad", "kind"), [(NAN, "NaN"), (-INF, "Inf")])
def test_all_ranks_raise_the_same_error(spawn: Spawn, size: int, bad: float, kind: str) -> None:
    last = size - 1
    for error in errors_of(spawn, size, [(last, "v1", bad)]):
        assert f"rank {last} (" in str(error)
        assert f"has {kind} for 'v1'. " in str(error)
        assert "in step 1 (counted from 0" in str(error)
        assert "(bucket 2/3)" in str(error)
        assert "rank 0" not in str(error)
        assert (error.rank, error.step, error.bucket) == (last, 1, 1)
        assert error.exit_code == 79


def test_each_rank_and_variable_with_nonfinite_values_is_named(spawn: Spawn) -> None:
    changes = [(0, "v1", INF), (2, "v1", -INF), (2, "v2", NAN)]
    text = str(errors_of(spawn, 3, changes)[0])
    first, second = text.split("; ")
    assert "rank 0 (" in first
    assert first.endswith("has Inf for 'v1'")
    assert "rank 2 (" in second
    assert "has NaN for 'v2', Inf for 'v1'" in second
    assert "rank 1" not in text


def test_an_overflow_of_the_sum_names_no_rank(spawn: Spawn) -> None:
    for error in errors_of(spawn, 2, [(0, "v0", LARGEST), (1, "v0", LARGEST)]):
        assert "the gradients of every rank are finite, but their sum has overflowed" in str(error)
        assert "Inf for 'v0'" in str(error)
        assert error.rank is None


@pytest.mark.parametrize(("transport", "size"), [("inproc", 2), ("grpc", 3), ("hosts", 4)])
def test_an_overflow_on_the_wire_names_no_rank(transport: str, size: int) -> None:
    # 70,000 is finite in float32, and not in fp16
    spawn = Spawn(transport)
    for error in errors_of(spawn, size, [(1, "v3", 70_000.0)], compression="fp16"):
        assert "their sum, or their fp16 form on the wire, has overflowed" in str(error)
        assert "Inf for 'v3'" in str(error)


def test_without_memory_to_share_the_error_is_the_same(
    spawn_shm: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostMemory, "allocate", lambda self, nbytes: None)
    for error in errors_of(spawn_shm, 2, [(1, "v1", NAN)]):
        assert "has NaN for 'v1'. " in str(error)


def test_only_the_reducer_with_nonfinite_values_raises(spawn: Spawn) -> None:
    def work(communicator: Communicator) -> None:
        healthy, broken = Sums(communicator), Sums(communicator)
        for _ in range(3):
            healthy.step()
            broken.step()
        healthy.step()
        with pytest.raises(NonFiniteGradientError, match=r"step 3 .*has NaN for 'v0'"):
            broken.step((1, "v0", NAN))
        healthy.close()
        broken.close()

    spawn(2, work)


# -- skip, warn, and neither ---------------------------------------------------------------

STEPS: dict[str, list[Change]] = {
    "rank 1": [(1, "v0", NAN)],
    "nobody": [],
    "both": [(0, "v3", INF), (1, "v3", -INF)],
    "rank 0": [(0, "v2", -INF)],
    "overflow": [(0, "v1", LARGEST), (1, "v1", LARGEST)],
    "large": [(0, "v1", LARGEST), (1, "v1", -LARGEST), (0, "v3", -LARGEST)],
}
BROKEN = {"rank 1": "v0", "both": "v3", "rank 0": "v2", "overflow": "v1"}


@pytest.mark.parametrize("nonfinite", ["skip", "warn"])
def test_each_rank_continues_and_logs_the_report(
    spawn: Spawn, nonfinite: str, caplog: pytest.LogCaptureFixture
) -> None:
    def work(communicator: Communicator) -> None:
        check = NonFiniteCheck(communicator)
        sums = Sums(communicator, check)
        for name, changes in STEPS.items():
            result = sums.step(*changes)
            broken = {v for v, total in result.items() if not np.isfinite(total).all()}
            assert broken == ({BROKEN[name]} if name in BROKEN else set())
            assert check.finite == (name not in BROKEN)
        sums.close()

    with caplog.at_level(logging.WARNING, "hostopt.gradients.nonfinite"):
        spawn(2, work, nonfinite=nonfinite)
    message = [r.getMessage() for r in caplog.records if r.name == "hostopt.gradients.nonfinite"]
    by_step = {step: [text for text in message if f"in step {step} " in text] for step in range(6)}
    assert [len(texts) for texts in by_step.values()] == [2, 0, 2, 2, 2, 0]
    assert all(len(set(texts)) <= 1 for texts in by_step.values())
    assert "rank 1" in by_step[0][0]
    assert "rank 0" not in by_step[0][0]
    assert "has Inf for 'v3'; rank 1" in by_step[2][0]
    assert "rank 0" in by_step[3][0]
    assert "their sum has overflowed: Inf for 'v1'" in by_step[4][0]
    end = {"skip": "No variable is updated in this step", "warn": "The update is made"}
    assert all(end[nonfinite] in text for text in message)


def test_allow_logs_nothing(spawn: Spawn, caplog: pytest.LogCaptureFixture) -> None:
    def work(communicator: Communicator) -> None:
        sums = Sums(communicator, NonFiniteCheck(communicator, ALLOW))
        for changes in STEPS.values():
            sums.step(*changes)
        assert np.isnan(sums.step((1, "v0", NAN))["v0"][-1])
        sums.close()

    spawn(2, work)
    assert not caplog.records


def test_large_values_and_fp16_raise_no_false_alarm(spawn: Spawn) -> None:
    def work(communicator: Communicator) -> None:
        sums = Sums(communicator)
        for _ in range(3):
            result = sums.step((0, "v3", 60_000.0), (1, "v1", -65_504.0), (2, "v3", 2_000.0))
            assert abs(result["v3"][-1] - 62_001) <= 64  # fp16 has steps of 32 there
        sums.close()

    spawn(3, work, compression="fp16")
