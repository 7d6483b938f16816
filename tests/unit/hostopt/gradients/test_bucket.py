"""Buckets: assignment of gradients, layout of the flat buffer and reuse of buffers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hostopt.gradients.bucket import Bucket, BufferPool, TensorSpec, plan_buckets


def spec(name: str, shape: tuple[int, ...], dtype: object = "f4") -> TensorSpec:
    return TensorSpec(name, shape, np.dtype(dtype))


MIXED = [
    spec("a", (4,)),
    spec("b", (10, 10)),  # 400 bytes, 448 with the gap behind them
    spec("c", (3,), "f2"),
    spec("d", (2,)),
    spec("e", (1000,)),  # larger than a bucket
    spec("f", ()),
    spec("g", (5,), "f2"),
    spec("h", (0, 7)),
]


# --- the plan ---------------------------------------------------------------------------------


def test_plan_in_reverse_order_by_dtype_and_size() -> None:
    plan = plan_buckets(MIXED, bucket_bytes=512)
    # ordered by the gradient that backward produces last
    assert [bucket.indices for bucket in plan] == [(7, 5), (4,), (6, 2), (3, 1), (0,)]
    assert [bucket.dtype.name for bucket in plan] == [
        "float32",
        "float32",
        "float16",
        "float32",
        "float32",
    ]
    assert [bucket.nbytes for bucket in plan] == [64, 4032, 128, 512, 64]
    assert [[part.name for part in bucket.specs] for bucket in plan] == [
        ["h", "f"],
        ["e"],
        ["g", "c"],
        ["d", "b"],
        ["a"],
    ]


def test_one_large_bucket_per_dtype() -> None:
    plan = plan_buckets(MIXED, bucket_bytes=1 << 20)
    assert [bucket.indices for bucket in plan] == [(6, 2), (7, 5, 4, 3, 1, 0)]


def test_a_tensor_larger_than_a_bucket_gets_a_separate_bucket() -> None:
    plan = plan_buckets([spec("a", (1,)), spec("b", (999,)), spec("c", (1,))], bucket_bytes=128)
    assert [bucket.indices for bucket in plan] == [(2,), (1,), (0,)]


def test_no_gradients_yield_no_buckets() -> None:
    assert plan_buckets([], bucket_bytes=512) == ()


@pytest.mark.parametrize("bucket_bytes", [64, 512, 1 << 20])
def test_a_bucket_exceeds_the_limit_only_for_a_single_gradient(bucket_bytes: int) -> None:
    rng = np.random.default_rng(3)
    specs = [spec(str(i), (int(n),)) for i, n in enumerate(rng.integers(0, 300, 100))]
    plan = plan_buckets(specs, bucket_bytes)
    assert sorted(i for bucket in plan for i in bucket.indices) == list(range(100))
    assert all(bucket.nbytes <= bucket_bytes or len(bucket.indices) == 1 for bucket in plan)


# --- the buffer -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("unit_bytes", [64, 320])
def test_parts_of_the_ranks_cover_each_gradient_once(
    count: int, dtype: object, unit_bytes: int
) -> None:
    sizes = [1000, 1, 0, 33, 300]
    specs = tuple(spec(f"v{n}", (n,), dtype) for n in sizes)
    bucket = Bucket(tuple(range(5)), specs, count, unit_bytes)
    parts = bucket.parts
    assert len(parts) == count
    nbytes = []
    for rank, chunk in enumerate(bucket.chunks):
        buffer = bucket.new_buffer()
        buffer[chunk] = 1
        views = bucket.views(buffer)
        for view, part in zip(views, parts[rank]):
            assert part.start * view.itemsize % unit_bytes == 0 or part.start == view.size
            assert view[part].all()
            view[part] = 0
        assert not any(view.any() for view in views)
        nbytes.append((chunk.stop - chunk.start) * bucket.dtype.itemsize)
    for index, size in enumerate(sizes):
        assert [i for rank in parts for i in range(size)[rank[index]]] == list(range(size))
    assert max(nbytes) == min(nbytes)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "i8", ml_dtypes.bfloat16])
def test_views_of_a_packed_buffer_equal_the_gradients(dtype: object) -> None:
    shapes = [(3,), (), (2, 5), (0, 4), (33,), (1, 1, 1)]
    (bucket,) = plan_buckets([spec(str(s), s, dtype) for s in shapes], 1 << 20)
    rng = np.random.default_rng(5)
    arrays = [rng.integers(-99, 100, s.shape).astype(s.dtype) for s in bucket.specs]
    arrays[-2] = np.asfortranarray(arrays[-2])
    buffer = bucket.new_buffer()
    bucket.pack(arrays, buffer)
    views = bucket.views(buffer)
    assert [view.shape for view in views] == shapes[::-1]
    for view, array in zip(views, arrays):
        assert view.dtype == array.dtype
        np.testing.assert_array_equal(view.astype("f8"), array.astype("f8"))


def test_views_are_aligned_and_do_not_overlap() -> None:
    specs = [spec(str(n), (n,), "f2") for n in (1, 31, 32, 33, 100, 0, 7)]
    (bucket,) = plan_buckets(specs, 1 << 20)
    buffers = [bucket.new_buffer() for _ in range(20)]  # malloc aligns to 16 bytes only
    for buffer in buffers:
        assert buffer.nbytes == bucket.nbytes + 64  # for a mark
        assert not buffer.any()
        views = bucket.views(buffer)
        assert [view.ctypes.data % 64 for view in views] == [0] * len(views)
        for number, view in enumerate(views, start=1):
            view[...] = number
        for number, view in enumerate(views, start=1):
            assert np.all(view == number)


# --- the pool ---------------------------------------------------------------------------------


@pytest.fixture
def bucket() -> Bucket:
    return plan_buckets([spec("a", (3, 4)), spec("b", ())], 1 << 20)[0]


def test_a_free_buffer_is_reused(bucket: Bucket) -> None:
    pool = BufferPool(bucket)
    addresses = set()
    for _ in range(5):
        buffer = pool.take()
        bucket.pack([np.float32(1), np.ones((3, 4))], buffer)
        addresses.add(buffer.ctypes.data)
        del buffer
    assert len(addresses) == 1


@pytest.mark.parametrize(
    "hold",
    [
        lambda bucket, buffer: buffer,
        lambda bucket, buffer: bucket.views(buffer)[0],
        lambda bucket, buffer: bucket.views(buffer)[1][1:, 2],
        lambda bucket, buffer: bucket.views(buffer)[1].T.reshape(2, 6, order="F"),
        lambda bucket, buffer: memoryview(bucket.views(buffer)[1]),
        lambda bucket, buffer: np.frombuffer(bucket.views(buffer)[1], np.uint8),
    ],
    ids=["buffer", "view", "slice", "reshaped", "memoryview", "frombuffer"],
)
def test_a_buffer_is_not_reused_while_a_view_is_alive(bucket, hold) -> None:
    pool = BufferPool(bucket)
    buffer = pool.take()
    address = buffer.ctypes.data
    held = hold(bucket, buffer)
    del buffer
    other = pool.take()
    assert not np.shares_memory(other, np.asarray(held))
    del held
    assert pool.take().ctypes.data == address
