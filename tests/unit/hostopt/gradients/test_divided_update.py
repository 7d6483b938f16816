"""Each rank updates its part of every variable, and gets the parts of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rings import Spawn

from hostopt.collectives.communicator import Communicator
from hostopt.gradients.bucket import TensorSpec
from hostopt.gradients.divided_update import DividedUpdate, part_of

FLOAT = np.dtype(np.float32)
SHAPES = [(7, 41), (300,), (1, 5), (2, 3, 64)]


def spec(index: int, shape: tuple[int, ...], dtype: np.dtype[Any] = FLOAT) -> TensorSpec:
    return TensorSpec(f"v{index}", shape, dtype)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000, 64 * 7])
def test_parts_cover_a_variable_once(size: int, count: int) -> None:
    parts = [part_of(size, index, count) for index in range(count)]
    assert [element for part in parts for element in range(size)[part]] == list(range(size))
    assert all(part.start % 64 == 0 or part.start == size for part in parts)
    lengths = [len(range(size)[part]) for part in parts]
    assert max(lengths) - min(lengths) <= 2 * 64


def parts_of(values: list[np.ndarray], communicator: Communicator) -> list[np.ndarray]:
    where = [part_of(value.size, communicator.rank, communicator.size) for value in values]
    return [value.reshape(-1)[part] for value, part in zip(values, where)]


@pytest.mark.parametrize("transport", ["inproc", "shm", "hosts"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_get_what_each_updates(transport: str, size: int) -> None:
    def run(communicator: Communicator) -> list[list[np.ndarray]]:
        divided = DividedUpdate(communicator, [spec(i, s) for i, s in enumerate(SHAPES)])
        steps = [[np.arange(np.prod(s), dtype=FLOAT).reshape(s) + 1 for s in SHAPES]]
        for _ in range(4):
            parts = parts_of(steps[-1], communicator)
            steps.append(
                divided.join([part * FLOAT.type(communicator.rank + 2) for part in parts])
            )
        return steps

    results = Spawn(transport)(size, run)
    for index, shape in enumerate(SHAPES):
        count = int(np.prod(shape))
        factors = np.empty(count, FLOAT)
        for rank in range(size):
            factors[part_of(count, rank, size)] = rank + 2
        for step in range(5):
            wanted = (np.arange(count, dtype=FLOAT) + 1) * factors**step
            for steps in results:  # the values of all steps are still held
                np.testing.assert_array_equal(steps[step][index], wanted.reshape(shape))


def test_values_are_read_only_and_lie_in_memory_that_the_ranks_share() -> None:
    def run(communicator: Communicator) -> tuple[bool, bytes]:
        divided = DividedUpdate(communicator, [spec(0, (256,))])
        (value,) = divided.join([np.zeros(128, FLOAT)])
        if communicator.rank == 1:
            value.base.view(FLOAT)[:3] = 5
        communicator.barrier("rank 1 has written")
        return value.flags.writeable, value[:3].tobytes()

    assert Spawn("shm")(2, run) == [(False, np.full(3, 5, FLOAT).tobytes())] * 2


def test_memory_is_reused_when_no_rank_holds_old_values() -> None:
    def run(communicator: Communicator) -> int:
        divided = DividedUpdate(communicator, [spec(0, (256,))])
        addresses = set()
        for _ in range(10):
            values = divided.join([np.zeros(128, FLOAT)])  # while the ones before are held
            addresses.add(values[0].ctypes.data)
        return len(addresses)

    assert Spawn("shm")(2, run) == [2, 2]


def test_ranks_without_memory_to_share_use_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(communicator: Communicator) -> np.ndarray:
        divided = DividedUpdate(communicator, [spec(0, (256,))])
        memory = divided._communicator.memory
        assert memory is not None
        monkeypatch.setattr(memory, "is_declined", communicator.rank == 1)
        return divided.join([np.full(128, communicator.rank + 1, FLOAT)])[0]

    for result in Spawn("shm")(2, run):
        np.testing.assert_array_equal(result, np.repeat(np.array([1, 2], FLOAT), 128))
