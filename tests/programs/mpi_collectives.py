"""Makes every collective over MPI, under a real mpirun, and compares all results with numpy."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import json
import random
import sys

import ml_dtypes
import numpy as np

import hostopt
from hostopt.by_name.named import NamedCollectives
from hostopt.collectives.mpi import group as mpi_group
from hostopt.collectives.mpi.group import MpiGroup
from hostopt.collectives.reduce_op import DTYPES
from hostopt.collectives.wire_format import new_wire_format

SIZES = (0, 1, 5, 1000, 70_001)
SHAPES = ((), (3,), (2, 0), (4, 5, 2))
checks = itertools.count()


def values(rank: int, shape: tuple[int, ...], dtype: str, salt: int = 0) -> np.ndarray:
    """Small integers, whose sums and products are exact in every dtype."""
    array = np.random.default_rng([rank, salt]).integers(0, 4, shape)
    return array.astype(getattr(ml_dtypes, dtype, dtype))


def same(result: np.ndarray, expected: np.ndarray, name: object) -> None:
    next(checks)
    expected = np.asarray(expected)
    assert result.dtype == expected.dtype, (name, result.dtype, expected.dtype)
    assert result.shape == expected.shape, (name, result.shape, expected.shape)
    assert result.tobytes() == expected.tobytes(), (name, result, expected)


def reductions(communicator: hostopt.Communicator) -> None:
    rank, size = communicator.rank, communicator.size
    for dtype in DTYPES:
        for op in hostopt.ReduceOp:
            if op is hostopt.ReduceOp.AVERAGE and "int" in dtype:
                continue
            for length in SIZES:
                name = f"{op.name} of {length} {dtype}"
                arrays = [values(r, (length,), dtype, length) for r in range(size)]
                expected = functools.reduce(op.ufunc, arrays)
                if op is hostopt.ReduceOp.AVERAGE:
                    expected = expected / expected.dtype.type(size)
                same(communicator.all_reduce(arrays[rank], op, name), expected, name)
                chunk = communicator.reduce_scatter(arrays[rank], op, name)
                same(chunk, np.array_split(expected, size)[rank], f"reduce_scatter {name}")


def special_values(communicator: hostopt.Communicator) -> None:
    """NaNs of any rank are in the result, and all ranks have the same bits."""
    size = communicator.size
    for dtype in (np.float16, np.float32, np.float64):
        for op in hostopt.ReduceOp:
            array = np.array([communicator.rank, 0.0, -0.0, 1e-3, 1.5], dtype) - dtype(0.1)
            array[communicator.rank % 5] = np.nan
            array[4] = -0.0 if communicator.rank % 2 else 0.0
            result = communicator.all_reduce(array, op, f"special {op.name}")
            assert np.isnan(result[: min(size, 4)]).all(), (op, result)
            every = communicator.all_gather(result, "all results")
            assert all(each.tobytes() == result.tobytes() for each in every), (op, every)


def compressed_sums(communicator: hostopt.Communicator) -> None:
    for name in ("fp16", "bf16"):
        for length in SIZES:
            wire_format = new_wire_format(name)
            arrays = [values(r, (length,), "float32", length) for r in range(communicator.size)]
            flat = arrays[communicator.rank].copy()
            call = communicator.next_call("compressed")
            communicator.all_reduce_in_place(flat, hostopt.ReduceOp.SUM, call, wire_format)
            same(flat, sum(arrays), f"sum as {name}")
        random_ = [np.random.default_rng(r).normal(size=999).astype(np.float32) for r in range(4)]
        arrays = random_[: communicator.size]
        flat = arrays[communicator.rank].copy()
        call = communicator.next_call("compressed")
        communicator.all_reduce_in_place(flat, hostopt.ReduceOp.SUM, call, wire_format)
        assert np.allclose(flat, sum(arrays), rtol=0.02, atol=0.02)
        every = communicator.all_gather(flat, "all results")
        assert all(each.tobytes() == flat.tobytes() for each in every)


def movements(communicator: hostopt.Communicator) -> None:
    rank, size = communicator.rank, communicator.size
    for dtype in (*DTYPES, "bool", "complex64", "S3"):
        for shape in SHAPES:
            arrays = [values(r, shape, dtype) for r in range(size)]
            same(communicator.all_gather(arrays[rank], dtype), np.stack(arrays), ("gather", dtype))
            for root in range(size):
                result = communicator.broadcast(arrays[rank], root, dtype)
                same(result, arrays[root], ("broadcast", dtype, shape))
    for length in SIZES:
        texts = [bytes([r]) * (length * r) for r in range(size)]
        assert communicator.all_gather_bytes(texts[rank]) == texts
        views = communicator.all_gather_bytes(np.frombuffer(texts[rank], np.uint8))
        assert [bytes(each) for each in views] == texts
        assert communicator.gather_bytes(texts[rank]) == ([] if rank else texts)
        assert communicator.scatter_bytes(texts) == texts[rank]
    communicator.barrier()
    table = {"b": "1", "a": "2"}
    assert communicator.check_same(table, "the table") == ["b", "a"]


def scalar_sums(communicator: hostopt.Communicator) -> None:
    total = communicator.open_scalar_sum("the loss")
    for step in range(3):
        total.start(communicator.rank + step, 1.0)
        expected = sum(range(communicator.size)) + step * communicator.size
        assert total.wait() == (expected, communicator.size)


def named_calls(communicator: hostopt.Communicator) -> None:
    """Threads make calls of different names in another order on each rank."""
    rank, size, named = communicator.rank, communicator.size, NamedCollectives(communicator)

    def call(index: int) -> None:
        for step in range(3):
            name = f"named {index}"
            arrays = [values(r, (index + 1, 2), "float32", step) for r in range(size)]
            (result,) = named.all_reduce([arrays[rank]], name)
            same(result, sum(arrays), name)
            rows = [values(r, (r + index, 2), "int32", step) for r in range(size)]
            same(named.all_gather(rows[rank], name), np.concatenate(rows), name)
            splits = [[(r + to + index) % 3 for to in range(size)] for r in range(size)]
            sent = [values(r, (sum(splits[r]), 2), "int64", step) for r in range(size)]
            result, received = named.all_to_all(sent[rank], splits[rank], name)
            cuts = [np.split(sent[r], np.cumsum(splits[r])[:-1])[rank] for r in range(size)]
            same(result, np.concatenate(cuts), name)
            assert received.tolist() == [len(cut) for cut in cuts]

    indices = list(range(8))
    random.Random(rank).shuffle(indices)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(call, indices))


def all_of_them(communicator: hostopt.Communicator) -> None:
    reductions(communicator)
    special_values(communicator)
    compressed_sums(communicator)
    movements(communicator)
    scalar_sums(communicator)
    named_calls(communicator)


def main() -> None:
    options = hostopt.Options(communication="mpi", segment_bytes=4096)
    with hostopt.connect(options=options) as communicator:
        first = communicator.next_call()
        if communicator.size > 1:
            communicator.begin(first)
            assert isinstance(communicator.group(first), MpiGroup)
        all_of_them(communicator)
        mpi_group._PIECE_BYTES = 512 * communicator.size  # many pieces
        all_of_them(communicator.duplicate("in pieces"))
        rank, size = communicator.rank, communicator.size
        communicator.finish()
    sys.stdout.write(json.dumps({"rank": rank, "size": size, "checks": next(checks)}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
