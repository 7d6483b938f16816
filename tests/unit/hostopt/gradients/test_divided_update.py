"""Each rank updates its part of every variable, and gets the parts of the others."""

from __future__ import annotations

import numpy as np
import pytest
from rings import Spawn

from hostopt.collectives.communicator import Communicator
from hostopt.gradients.bucket import ALIGNMENT_BYTES, Bucket, TensorSpec
from hostopt.gradients.divided_update import DividedUpdate

FLOAT = np.dtype(np.float32)
MORE = ALIGNMENT_BYTES // FLOAT.itemsize
SHAPES = [(7, 41), (300,), (1, 5), (2, 3, 64)]


def bucket(size: int, *shapes: tuple[int, ...]) -> Bucket:
    specs = [TensorSpec(f"v{i}", shape, FLOAT) for i, shape in enumerate(shapes)]
    return Bucket(tuple(range(len(specs))), tuple(specs), size)


def update(
    divided: DividedUpdate, values: list[np.ndarray], factor: float
) -> tuple[list[np.ndarray], list[int]]:
    """Multiplies this rank's parts in place; returns new values, and addresses of the parts."""
    divided.note(values)
    values.clear()
    parts = [memory[:-MORE] for memory in divided.begin()]
    for part in parts:
        np.multiply(part, FLOAT.type(factor), out=part)
    return divided.join(parts), [part.ctypes.data for part in parts]


@pytest.mark.parametrize("transport", ["inproc", "shm", "hosts"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_get_what_each_updates(transport: str, size: int) -> None:
    def run(communicator: Communicator) -> list[list[np.ndarray]]:
        divided = DividedUpdate(communicator, bucket(communicator.size, *SHAPES))
        steps = [[np.arange(np.prod(s), dtype=FLOAT).reshape(s) + 1 for s in SHAPES]]
        for _ in range(4):
            steps.append(update(divided, list(steps[-1]), communicator.rank + 2)[0])
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
        (value,), _ = update(divided, [np.zeros(256, FLOAT)], 1)
        if communicator.rank == 1:
            value.base.view(FLOAT)[:3] = 5
        communicator.barrier("rank 1 has written")
        return value.flags.writeable, value[:3].tobytes()

    assert Spawn("shm")(2, run) == [(False, np.full(3, 5, FLOAT).tobytes())] * 2


@pytest.mark.parametrize("transport", ["inproc", "shm"])
def test_parts_are_updated_in_place_until_a_rank_holds_values(transport: str) -> None:
    def run(communicator: Communicator) -> tuple[int, bool]:
        divided = DividedUpdate(communicator, bucket(communicator.size, (256,)))
        values, addresses = [np.ones(256, FLOAT)], set()
        for _ in range(10):
            values, (address,) = update(divided, values, 2)
            addresses.add(address)
        held = list(values) if communicator.rank == 1 else []
        values, (address,) = update(divided, values, 2)
        assert np.all(values[0] == 2**11) and all(np.all(each == 2**10) for each in held)
        return len(addresses), address in addresses

    in_place, copied = (1, True), (1, False)
    # memory of another rank is another one
    assert Spawn(transport)(2, run) == [copied if transport == "shm" else in_place, copied]


def test_a_value_that_was_assigned_counts() -> None:
    def run(communicator: Communicator) -> np.ndarray:
        divided = DividedUpdate(communicator, bucket(communicator.size, (256,), (256,)))
        values, _ = update(divided, [np.ones(256, FLOAT), np.ones(256, FLOAT)], 2)
        values[0] = np.full(256, 10, FLOAT)
        values, _ = update(divided, values, 2)
        return np.array(values)

    for result in Spawn("shm")(2, run):
        np.testing.assert_array_equal(result, [np.full(256, 20), np.full(256, 4)])


def test_a_scalar_is_a_number_as_tensorflow_passes_it() -> None:
    def run(communicator: Communicator) -> tuple[float, float]:
        divided = DividedUpdate(communicator, bucket(communicator.size, (), (256,)))
        values, _ = update(divided, [FLOAT.type(3), np.ones(256, FLOAT)], 2)
        (scalar, vector), _ = update(divided, [values[0][()], values[1]], 2)
        return float(scalar), float(vector[-1])

    assert Spawn("shm")(2, run) == [(12.0, 4.0)] * 2


def test_parts_elsewhere_are_copied() -> None:
    def run(communicator: Communicator) -> np.ndarray:
        divided = DividedUpdate(communicator, bucket(communicator.size, (256,)))
        divided.note([np.ones(256, FLOAT)])
        return divided.join([part[:-MORE] * FLOAT.type(3) for part in divided.begin()])[0]

    for result in Spawn("shm")(2, run):
        np.testing.assert_array_equal(result, np.full(256, 3))


@pytest.mark.parametrize("keeps_memory", [True, False])
def test_parts_of_shared_slots_are_in_memory_after_an_update(
    keeps_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(communicator: Communicator) -> np.ndarray:
        memory = communicator.memory
        assert memory is not None
        shared = memory.allocate(256 * FLOAT.itemsize)
        assert shared is not None
        slot, rank = np.frombuffer(shared, FLOAT), communicator.rank
        part = slot[128 * rank : 128 * (rank + 1)]
        divided = DividedUpdate(communicator, bucket(communicator.size, (256,)), [part])
        if not keeps_memory:
            monkeypatch.setattr(divided._communicator.memory, "allocate", lambda nbytes: None)
        for step in range(3):
            divided.note([np.ones(256, FLOAT)])
            before = slot.copy()  # the other rank has not updated its part yet
            assert np.all(before == 0) if step == 0 else list(np.unique(before)) == [step, 9]
            parts = [each[:-MORE] for each in divided.begin()]
            new = np.full(128, step + 1 if rank == 0 else 9, FLOAT)
            divided.join([*parts, new])
            communicator.barrier()
        return slot.copy()

    for slot in Spawn("shm")(2, run):
        np.testing.assert_array_equal(slot, np.repeat([3, 9], 128))


def test_ranks_without_memory_to_share_use_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(communicator: Communicator) -> np.ndarray:
        divided = DividedUpdate(communicator, bucket(communicator.size, (256,)))
        memory = divided._communicator.memory
        assert memory is not None
        monkeypatch.setattr(memory, "is_declined", communicator.rank == 1)
        return update(divided, [np.ones(256, FLOAT)], communicator.rank + 1)[0][0]

    first, second = Spawn("shm")(2, run)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(np.unique(first), [1, 2])


def test_ranks_that_get_no_more_memory_keep_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(communicator: Communicator) -> list[np.ndarray]:
        divided = DividedUpdate(communicator, bucket(communicator.size, (256,)))
        steps = [update(divided, [np.ones(256, FLOAT)], 2)[0]]
        memory = divided._communicator.memory
        assert memory is not None
        monkeypatch.setattr(memory, "allocate", lambda nbytes: None)
        for _ in range(2):
            steps.append(update(divided, list(steps[-1]), 2)[0])
        return [value for (value,) in steps]

    for results in Spawn("shm")(2, run):
        for result, wanted in zip(results, (2, 4, 8)):
            np.testing.assert_array_equal(result, np.full(256, wanted))
