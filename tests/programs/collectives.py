"""Makes every collective of hostopt.tensorflow, and compares all results with numpy.

The calls are made eagerly, in threads, in a function and in a graph. Each rank makes them in
another order, except eagerly in one thread.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
import hostopt.tensorflow as hvd

DTYPES = [tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64]
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


@dataclasses.dataclass
class Case:
    """One call and its results.

    Args:
      expected: the results, computed with numpy; one of them needs no list.
      gradient: gradient of the sum of the results, weighted with 1, 2, 3, ..., with respect to
        the first input; None is not compared.
    """

    name: str
    inputs: list[np.ndarray]
    call: Callable[..., Any]
    expected: Any
    gradient: np.ndarray | None = None


def values(rank: int, shape: tuple[int, ...], dtype: tf.DType, salt: int = 0) -> np.ndarray:
    """Small integers, whose sums and products are exact in every dtype."""
    array = np.random.default_rng([rank, salt]).integers(0, 4, shape)
    return array.astype(dtype.as_numpy_dtype)


def weights(array: np.ndarray) -> np.ndarray:
    return (np.arange(array.size) % 5 + 1).reshape(array.shape).astype(array.dtype)


def total(arrays: list[np.ndarray]) -> np.ndarray:
    return sum(arrays[1:], arrays[0])


def cases() -> list[Case]:
    return [
        dataclasses.replace(case, name=f"{case.name} {dtype.name}")
        for dtype in DTYPES
        for case in [*reductions(dtype), *movements(dtype)]
    ]


def reductions(dtype: tf.DType) -> list[Case]:
    numpy, size = dtype.as_numpy_dtype, numpy_of(SIZE, dtype)
    all_ = [values(rank, (3, 2), dtype) for rank in range(SIZE)]
    local, ones, stacked, sum_ = all_[RANK], weights(all_[0]), np.stack(all_), total(all_)
    slots = np.array([RANK, 0, RANK])
    part, first_part = (np.array_split(each, SIZE)[RANK] for each in (sum_, sum_[:, 0]))
    by_part = np.concatenate([weights(part) for part in np.array_split(all_[0], SIZE)])
    product = np.prod(stacked, 0, dtype=numpy)
    scaled = {"op": hvd.Sum, "prescale_factor": 2.0, "postscale_factor": 0.5}
    mean = (sum_ / size if dtype.is_floating else sum_ // size).astype(numpy)
    return [
        Case("sum", [local], partial(hvd.allreduce, op=hvd.Sum), sum_, ones * size),
        Case("min", [local], partial(hvd.allreduce, op=hvd.Min), np.min(stacked, 0)),
        Case("max", [local], partial(hvd.allreduce, op=hvd.Max), np.max(stacked, 0)),
        Case("product", [local], partial(hvd.allreduce, op=hvd.Product), product),
        Case("grouped", [local, local[0]], grouped_sum, [sum_, sum_[0]], ones * size),
        Case("reducescatter", [local], scattered_sum, part, by_part),
        Case("grouped_reducescatter", [local, local[:, 0]], grouped_scatter, [part, first_part]),
        Case("average", [local], partial(hvd.allreduce, average=True), mean, ones),
        Case("scaled", [local], partial(hvd.allreduce, **scaled), sum_, ones * size),
        Case("rows", [local, slots], sum_of_rows, dense_rows(all_)),
    ]


def grouped_sum(*tensors: tf.Tensor, name: str) -> list[tf.Tensor]:
    return hvd.grouped_allreduce(list(tensors), op=hvd.Sum, name=name)


def scattered_sum(x: tf.Tensor, name: str) -> tf.Tensor:
    return hvd.reducescatter(x, "", hvd.Compression.none, hvd.Sum, name, hvd.global_process_set)


def grouped_scatter(*tensors: tf.Tensor, name: str) -> list[tf.Tensor]:
    return hvd.grouped_reducescatter(list(tensors), op=hvd.Sum, name=name)


def grouped_gather(*tensors: tf.Tensor, name: str) -> list[tf.Tensor]:
    return hvd.grouped_allgather(list(tensors), name=name)


def sum_of_rows(x: tf.Tensor, i: tf.Tensor, name: str) -> tf.Tensor:
    rows = tf.IndexedSlices(x, i, tf.constant([SIZE, 2], tf.int64))
    return tf.convert_to_tensor(hvd.allreduce(rows, op=hvd.Sum, name=name))


def dense_rows(all_: list[np.ndarray]) -> np.ndarray:
    result = np.zeros((SIZE, 2), all_[0].dtype)
    for rank, (first, second, third) in enumerate(all_):
        result[rank] += first
        result[0] += second
        result[rank] += third
    return result


def numpy_of(number: float, dtype: tf.DType) -> Any:
    return np.array(number, dtype.as_numpy_dtype)


def movements(dtype: tf.DType) -> list[Case]:
    root = SIZE - 1
    size = numpy_of(SIZE, dtype)
    # ranks differ in the number of rows
    rows = [values(rank, (rank + 1, 2), dtype) for rank in range(SIZE)]
    joined = np.concatenate(rows)
    starts = np.cumsum([0, *map(len, rows)])
    same = [values(rank, (3, 2), dtype) for rank in range(SIZE)]
    sent = [values(rank, (SIZE, 2), dtype, 1) for rank in range(SIZE)]
    counts = [[(rank + to) % 2 for to in range(SIZE)] for rank in range(SIZE)]
    parts = [
        np.split(values(rank, (sum(counts[rank]), 2), dtype, 2), np.cumsum(counts[rank])[:-1])
        for rank in range(SIZE)
    ]
    received = [parts[rank][RANK] for rank in range(SIZE)]
    is_root = numpy_of(root == RANK, dtype)
    own = weights(joined)[starts[RANK] : starts[RANK + 1]]
    exchanged = np.stack([sent[rank][RANK] for rank in range(SIZE)])
    of_one_rank = np.stack([weights(sent[0])[RANK]] * SIZE)
    lengths = np.array([len(each) for each in received], np.int32)
    split = partial(hvd.alltoall, splits=counts[RANK])
    pieces = [np.concatenate(received), lengths]
    at_root = weights(same[0]) * size * is_root
    return [
        Case("allgather", [rows[RANK]], hvd.allgather, joined, own * size),
        Case(
            "grouped_allgather",
            [rows[RANK], same[RANK]],
            grouped_gather,
            [joined, np.concatenate(same)],
        ),
        Case(
            "broadcast", [same[RANK]], partial(hvd.broadcast, root_rank=root), same[root], at_root
        ),
        Case("alltoall", [sent[RANK]], hvd.alltoall, exchanged, of_one_rank),
        Case("alltoall with splits", [np.concatenate(parts[RANK])], split, pieces),
    ]


def differentiable(case: Case) -> bool:
    dtype = case.inputs[0].dtype
    return case.gradient is not None and tf.as_dtype(dtype).is_floating


def make(case: Case, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the results of a case, and the gradient if there is one."""
    with tf.GradientTape() as tape:
        tape.watch(inputs[0])
        results = case.call(*inputs, name=case.name)
        results = [*results] if isinstance(case.expected, list) else [results]
        if not differentiable(case):
            return results
        loss = tf.add_n([tf.reduce_sum(each * weights_of(each)) for each in results[:1]])
    return [*results, tape.gradient(loss, inputs[0])]


def weights_of(tensor: tf.Tensor) -> tf.Tensor:
    numbers = tf.reshape(tf.range(tf.size(tensor)) % 5 + 1, tf.shape(tensor))
    return tf.cast(numbers, tensor.dtype)


def compare(case: Case, results: list[Any]) -> None:
    expected = [*case.expected] if isinstance(case.expected, list) else [case.expected]
    if differentiable(case):
        expected.append(case.gradient)
    assert len(results) == len(expected), case.name
    for result, wanted in zip(results, expected):
        array = np.asarray(result)
        assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape), (case.name, array)
        assert np.array_equal(array, wanted), f"{case.name}: {array} {wanted}"


def run_eagerly(case: Case) -> None:
    compare(case, make(case, [tf.constant(each) for each in case.inputs]))


def run_function(shuffled: list[Case]) -> None:
    @tf.function(autograph=False)
    def step() -> Any:
        return [make(case, [tf.constant(each) for each in case.inputs]) for case in shuffled]

    for _ in range(2):
        for case, results in zip(shuffled, step()):
            compare(case, results)


def run_graph(shuffled: list[Case]) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        built = [make(case, [tf.constant(each) for each in case.inputs]) for case in shuffled]
        for _ in range(2):
            for case, results in zip(shuffled, session.run(built)):
                compare(case, results)


def check_a_name_that_is_used_again() -> None:
    """Checks calls of one name in a graph, whose operations run in any order."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        sums = [hvd.allreduce(tf.fill([2], i), op=hvd.Sum, name="again") for i in range(20)]
        for _ in range(2):
            assert [total.tolist() for total in session.run(sums)] == [
                [i * SIZE] * 2 for i in range(20)
            ]


def check_sparse_as_dense() -> None:
    table = tf.Variable(tf.ones([3, 2]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [2, 2])) * float(RANK + 1)
    tape = hvd.DistributedGradientTape(tape, sparse_as_dense=True, op=hvd.Sum)
    expected = SIZE * (SIZE + 1.0)
    assert tape.gradient(loss, [table])[0].numpy().tolist() == [[0, 0], [0, 0], [expected] * 2]


def check_objects() -> None:
    """Checks that all ranks learn of an object that one of them cannot send."""
    last = SIZE - 1
    obj = object() if last == RANK else RANK
    calls = [
        lambda: hvd.broadcast_object(obj, last, name="refused"),
        lambda: hvd.allgather_object(obj, name="all refused"),
    ]
    for each in calls:
        try:
            each()
        except hostopt.ConfigError as error:
            assert f"rank {last} (" in str(error) and "a part of type object" in str(error), error
        else:
            raise AssertionError("an object was sent")
    assert hvd.broadcast_object({RANK}, last, name="refused") == {last}
    assert hvd.allgather_object(RANK, name="all refused") == list(range(SIZE))


def main() -> None:
    in_order = cases()
    for case in in_order:
        run_eagerly(case)
    shuffled = random.Random(RANK).sample(in_order, len(in_order))
    with concurrent.futures.ThreadPoolExecutor(len(shuffled)) as pool:
        list(pool.map(run_eagerly, shuffled))
    run_function(shuffled)
    run_graph(shuffled)
    check_a_name_that_is_used_again()
    check_sparse_as_dense()
    check_objects()
    hvd.barrier()
    # at once, or mpirun may join it with other lines
    sys.stdout.write(f"made {len(in_order)} calls in 4 ways\n")


main()
