"""Each rank updates its part of every variable, and gets the parts of the others."""

from __future__ import annotations

import numpy as np
import pytest
from rings import Spawn

from hostopt.collectives.communicator import Communicator
from hostopt.gradients.bucket import Bucket, TensorSpec
from hostopt.gradients.divided_update import DividedUpdate

FLOAT = np.dtype(np.float32)
SHAPES = [(7, 41), (300,), (1, 5), (2, 3, 64)]


def bucket(size: int, *shapes: tuple[int, ...]) -> Bucket:
    specs = [TensorSpec(f"v{i}", shape, FLOAT) for i, shape in enumerate(shapes)]
    return Bucket(tuple(range(len(specs))), tuple(specs), size)


def parts_of(values: list[np.ndarray], communicator: Communicator) -> list[np.ndarray]:
    shapes = [value.shape for value in values]
    where = bucket(communicator.size, *shapes).parts[communicator.rank]
    return [value.reshape(-1)[part] for value, part in zip(values, where)]


@pytest.mark.parametrize("transport", ["inproc", "shm", "hosts"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_get_what_each_updates(transport: str, size: int) -> None:
    def run(communicator: Communicator) -> list[list[np.ndarray]]:
        divided = DividedUpdate(communicator, bucket(communicator.size, *SHAPES))
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
            factors[bucket(size, *SHAPES).parts[rank][index]] = rank + 2
        for step in range(5):
            wanted = (np.arange(count, dtype=FLOAT) + 1) * factors**step
            for steps in results:  # the values of all steps are still held
                np.testing.assert_array_equal(steps[step][index], wanted.reshape(shape))


def test_values_are_read_only_and_lie_in_memory_that_the_ranks_share() -> None:
    def run(communicator: Communicator) -> tuple[bool, bytes]:
        divided = DividedUpdate(communicator, bucket(communicator.size, (256,)))
        (value,) = divided.join(parts_of([np.zeros(256, FLOAT)], communicator))
        if communicator.rank == 1:
            value.base.view(FLOAT)[:3] = 5
        communicator.barrier("rank 1 has written")
        return value.flags.writeable, value[:3].tobytes()

    assert Spawn("shm")(2, run) == [(False, np.full(3, 5, FLOAT).tobytes())] * 2


def test_memory_is_reused_when_no_rank_holds_old_values() -> None:
    def run(communicator: Communicator) -> int:
        divided = DividedUpdate(communicator, bucket(communicator.size, (256,)))
        addresses = set()
        for _ in range(10):
            # while the ones before are held
            values = divided.join(parts_of([np.zeros(256, FLOAT)], communicator))
            addresses.add(values[0].ctypes.data)
        return len(addresses)

    assert Spawn("shm")(2, run) == [2, 2]


def test_ranks_without_memory_to_share_use_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(communicator: Communicator) -> np.ndarray:
        divided = DividedUpdate(communicator, bucket(communicator.size, (256,)))
        memory = divided._communicator.memory
        assert memory is not None
        monkeypatch.setattr(memory, "is_declined", communicator.rank == 1)
        parts = parts_of([np.full(256, communicator.rank + 1, FLOAT)], communicator)
        return divided.join(parts)[0]

    first, second = Spawn("shm")(2, run)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(np.unique(first), [1, 2])
