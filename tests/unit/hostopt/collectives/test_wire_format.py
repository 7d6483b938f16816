"""Conversions compared bit by bit with ml_dtypes and numpy, and the ring with its definition."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rings import Spawn

from hostopt.collectives import wire_format
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.collectives.ring import RingGroup
from hostopt.collectives.wire_format import new_wire_format, no_compression
from hostopt.errors import CollectiveMismatchError, ConfigError, HostOptError
from hostopt.gradients.bucket import TensorSpec, plan_buckets
from hostopt.gradients.nonfinite import NonFiniteCheck
from hostopt.gradients.reducer import Reducer
from hostopt.options import WIRE_FORMATS

Array = np.ndarray[Any, Any]

DTYPES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
NAMES = sorted(DTYPES)
assert sorted(WIRE_FORMATS) == NAMES
ALL_BITS = np.arange(1 << 16, dtype=np.uint16)
# none, one, fewer than most rings have ranks, indivisible; a segment has 16 bytes
LENGTHS = (0, 1, 3, 21, 128, 1001)
TINY_SEGMENT_BYTES = 16


def rounded(values: Array, name: str) -> Array:
    """Converts `values` to the dtype of the wire with the reference implementation."""
    with np.errstate(all="ignore"):
        return values.astype(DTYPES[name])


def same_bits(result: Array, expected: Array) -> None:
    """Checks that both arrays have the same bits, or NaN in the same positions."""
    assert result.dtype == expected.dtype
    uint = np.dtype(f"u{result.itemsize}")
    with np.errstate(invalid="ignore"):  # a signalling NaN
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(result), nan)
    np.testing.assert_array_equal(result[~nan].view(uint), expected[~nan].view(uint))


def finite(name: str) -> Array:
    """Returns all finite values of a format, in ascending order, as float64."""
    with np.errstate(invalid="ignore"):
        values = ALL_BITS.view(DTYPES[name]).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def around(values: Array) -> Array:
    """Returns each value as float32 and its neighbours."""
    with np.errstate(all="ignore"):
        middle = values.astype(np.float32)
    infinity = np.float32(np.inf)
    return np.concatenate(
        [middle, np.nextafter(middle, infinity), np.nextafter(middle, -infinity)]
    )


# --- one conversion ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_value_is_decoded(name: str) -> None:
    wire = ALL_BITS.view(DTYPES[name])
    result = np.empty(wire.size, np.float32)
    new_wire_format(name).decode(wire, result)
    same_bits(result, wire.astype(np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_every_value_survives_a_round_trip(name: str) -> None:
    wire, values = ALL_BITS.view(DTYPES[name]), np.empty(ALL_BITS.size, np.float32)
    format_ = new_wire_format(name)
    format_.decode(wire, values)
    same_bits(format_.encode(values), wire)


@pytest.mark.parametrize("name", NAMES)
def test_halfway_cases_and_their_neighbours(name: str) -> None:
    values = finite(name)
    cases = around(np.concatenate([values, (values[:-1] + values[1:]) / 2]))
    same_bits(new_wire_format(name).encode(cases), rounded(cases, name))


@pytest.mark.parametrize("name", NAMES)
def test_any_float32(name: str) -> None:
    rng = np.random.default_rng(3)
    cases = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint64).astype(np.uint32).view(np.float32)
    same_bits(new_wire_format(name).encode(cases), rounded(cases, name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("exponent", range(-150, 128, 3))
def test_values_of_every_magnitude(name: str, exponent: int) -> None:
    # no infinities or NaNs among them, which fp16 treats block by block
    rng = np.random.default_rng(exponent + 1000)
    cases = np.ldexp(rng.uniform(-8, 8, 3001), min(exponent, 124)).astype(np.float32)
    same_bits(new_wire_format(name).encode(cases), rounded(cases, name))


@pytest.mark.parametrize("name", NAMES)
def test_boundary_values(name: str) -> None:
    edges = {
        "fp16": [65504, 65519.996, 65520, 65536, 2**-14, 2**-24, 2**-25, 1.5 * 2**-24],
        "bf16": [3.3895314e38, 3.3961775e38, 3.4028235e38, 2**-126, 2**-133, 2**-134],
    }[name]
    for value in [0, 1e-45, np.inf, np.nan, *edges]:
        for case in (np.array([value], np.float32), np.array([-value], np.float32)):
            same_bits(new_wire_format(name).encode(case), rounded(case, name))


def test_values_that_are_too_large_become_infinite() -> None:
    case = np.array([65519.996, 65520, -65520, 1e38], np.float32)
    assert new_wire_format("fp16").encode(case).tolist() == [65504, np.inf, -np.inf, np.inf]
    case = np.array([3.3961775e38, -3.4028235e38], np.float32)
    result = new_wire_format("bf16").encode(case).astype(np.float32)
    assert result.tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("name", NAMES)
def test_conversions_do_not_warn(name: str) -> None:
    cases = np.array([np.nan, np.inf, 1e38, 3.4e38, 1e-45, 1e-7, 1], np.float32)
    signalling = np.array([0x7F80_0001, 0xFFA0_0000], np.uint32).view(np.float32)
    format_, out = new_wire_format(name), np.empty(9, np.float32)
    with warnings.catch_warnings(), np.errstate(all="warn"):
        warnings.simplefilter("error")
        wire = format_.encode(np.concatenate([cases, signalling]))
        format_.decode(wire, out)
        format_.decode(ALL_BITS.view(DTYPES[name]), np.empty(ALL_BITS.size, np.float32))
    assert np.isnan(out[[0, 7, 8]]).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("extra", [-1, 0, 1, 2 * wire_format._BLOCK - 1])
def test_blocks_are_concatenated(name: str, extra: int) -> None:
    length = wire_format._BLOCK + extra
    values = np.random.default_rng(5).normal(size=length + 1).astype(np.float32)[1:]
    values[-2] = np.nan  # so that the last block takes a different code path than the first
    format_, local = new_wire_format(name), np.arange(length, dtype=np.float32)
    wire = format_.encode(values)
    same_bits(wire, rounded(values, name))
    format_.reduce(local, wire, np.add)
    same_bits(local, np.arange(length, dtype=np.float32) + wire.astype(np.float32))


def test_a_format_reuses_one_array() -> None:
    format_ = new_wire_format("fp16")
    large = format_.encode(np.ones(10, np.float32))
    small = format_.encode(np.zeros(4, np.float32))
    assert small.shape == (4,)
    assert np.shares_memory(large, small)


def test_contiguous_arrays_are_not_copied() -> None:
    values = np.arange(4.0)
    format_ = no_compression(values.dtype)
    assert format_.encode(values) is values
    format_.reduce(values, np.array([1.0, 5.0, 0.0, 9.0]), np.maximum)
    assert values.tolist() == [1, 5, 2, 9]


def test_no_format_for_no_compression() -> None:
    assert new_wire_format(None) is None


# --- the definition in docs/algorithms.md -----------------------------------------------------


def gradients(size: int, length: int, seed: int = 0) -> Array:
    """Returns typical gradients, most of them subnormal in fp16."""
    rng = np.random.default_rng([size, length, seed])
    data = rng.normal(size=(size, length)) * 10.0 ** rng.uniform(-7, 1, (size, length))
    return data.astype(np.float32)


def emulated(data: Array, name: str) -> Array:
    """Emulates an all-reduce of float32 [ranks, n], hop by hop for each chunk."""
    size, chunks = len(data), []
    if size == 1:
        return data[0]
    if size == 2:  # exchanged: each adds what both have rounded
        return rounded(data[0], name).astype(np.float32) + rounded(data[1], name)
    for chunk, parts in enumerate(zip(*(np.array_split(row, size) for row in data))):
        total = parts[(chunk + 1) % size]
        for hop in range(2, size + 1):
            total = parts[(chunk + hop) % size] + rounded(total, name).astype(np.float32)
        chunks.append(rounded(total, name).astype(np.float32))
    return np.concatenate(chunks)


def reduce(communicator: Communicator, local: Array, name: str | None) -> Array:
    flat = local.copy()
    call = communicator.next_call("the gradients")
    communicator.all_reduce_in_place(flat, ReduceOp.SUM, call, new_wire_format(name))
    return flat


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", range(1, 9))
def test_all_reduce_equals_its_definition(spawn_ring: Spawn, size: int, name: str) -> None:
    def work(communicator: Communicator) -> list[Array]:
        return [
            reduce(communicator, gradients(size, length)[communicator.rank], name)
            for length in LENGTHS
        ]

    result = spawn_ring(size, work, segment_bytes=TINY_SEGMENT_BYTES)
    for length, arrays in zip(LENGTHS, zip(*result)):
        expected = emulated(gradients(size, length), name)
        for array in arrays:
            same_bits(array, expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [2, 3])
def test_large_all_reduce_equals_its_definition(spawn_ring: Spawn, size: int, name: str) -> None:
    data = gradients(size, 300_001)
    result = spawn_ring(size, lambda c: reduce(c, data[c.rank], name), segment_bytes=1 << 17)
    for array in result:
        same_bits(array, emulated(data, name))


@pytest.mark.parametrize("segment_bytes", [1, 2, 3, 5, 7])
def test_segments_smaller_than_a_value(spawn_inproc: Spawn, segment_bytes: int) -> None:
    data = gradients(3, 10)
    result = spawn_inproc(
        3, lambda c: reduce(c, data[c.rank], "fp16"), segment_bytes=segment_bytes
    )
    for array in result:
        same_bits(array, emulated(data, "fp16"))


@pytest.mark.parametrize("name", NAMES)
def test_infinities_and_nans_reach_all_ranks(spawn_ring: Spawn, name: str) -> None:
    size, data = 3, gradients(3, 12)
    data[0, 0], data[1, 5], data[2, 11] = np.nan, np.inf, np.nan
    # float32 holds their sum, the format does not
    data[:, 7] = [6e4, 6e4, 6e4] if name == "fp16" else [3.38e38, 1e36, 1e36]
    expected = emulated(data, name)
    result = spawn_ring(size, lambda c: reduce(c, data[c.rank], name))
    assert np.isnan(expected).nonzero()[0].tolist() == [0, 11]
    assert np.isinf(expected).nonzero()[0].tolist() == [5, 7]
    assert len({array.tobytes() for array in result}) == 1
    for array in result:
        same_bits(array, expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [2, 5, 8])
def test_the_rounding_error_is_that_of_the_format(
    spawn_inproc: Spawn, size: int, name: str
) -> None:
    data = gradients(size, 10_000)
    result = spawn_inproc(size, lambda c: reduce(c, data[c.rank], name))[0]
    info, exact = ml_dtypes.finfo(DTYPES[name]), data.astype(np.float64)
    # size roundings, each by half a step, of what is at most the sum of magnitudes; float32's own
    # roundings are in the step that is added
    half_step = float(info.eps) / 2 * np.abs(exact).sum(axis=0)
    bound = (size + 1) * (half_step + float(info.smallest_subnormal) / 2)
    assert np.all(np.abs(result - exact.sum(axis=0)) <= bound)


@pytest.mark.parametrize("reduces", [True, False])
def test_reduce_scatter_and_all_gather(spawn_inproc: Spawn, reduces: bool) -> None:
    size, data = 3, gradients(3, 9)

    def work(communicator: Communicator) -> Array:
        ring = RingGroup(communicator.transport, (), new_wire_format("bf16"))
        call, flat = communicator.next_call(), data[communicator.rank].copy()
        if reduces:
            return ring.reduce_scatter(call, flat)
        chunk = flat[3 * communicator.rank :][:3]
        return ring.all_gather(call, chunk).reshape(-1)

    result = np.stack(spawn_inproc(size, work, segment_bytes=TINY_SEGMENT_BYTES))
    if reduces:  # each chunk has the bits that an all-reduce gives it on all ranks
        same_bits(result.reshape(-1), emulated(data, "bf16"))
    else:  # gathered chunks are rounded, also on the rank that has sent them
        chunks = np.concatenate([data[rank, 3 * rank : 3 * rank + 3] for rank in range(size)])
        for array in result:
            same_bits(array, rounded(chunks, "bf16").astype(np.float32))


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(ReduceOp.SUM, "f8"), (ReduceOp.SUM, "f2"), (ReduceOp.SUM, "i4"), (ReduceOp.MAX, "f4")],
)
def test_only_sums_of_float32(spawn_inproc: Spawn, op: ReduceOp, dtype: str) -> None:
    def work(communicator: Communicator) -> None:
        flat = np.zeros(3, dtype)
        with pytest.raises(ConfigError, match=rf"{op.name} of {flat.dtype.name}.* bf16"):
            communicator.all_reduce_in_place(
                flat, op, communicator.next_call(), new_wire_format("bf16")
            )

    spawn_inproc(1, work)


# --- the wire ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_compression_halves_the_payload_bytes(spawn_ring: Spawn, size: int) -> None:
    chunk, segment_bytes = 120, 100  # 240 bytes in two messages of 50 values and one of 20
    counts: dict[str | None, set[tuple[int, int]]] = {}
    for name in (None, *NAMES):

        def work(communicator: Communicator, name: str | None = name) -> tuple[int, int]:
            reduce(communicator, np.ones(size * chunk, np.float32), name)
            traffic = communicator.transport.traffic
            return traffic.messages, traffic.payload_bytes

        counts[name] = set(spawn_ring(size, work, segment_bytes=segment_bytes, streams=1))
    rounds = 2 * (size - 1)
    assert counts[None] == {(rounds * 5, rounds * chunk * 4)}
    halves = 5 if size == 2 else rounds * 3  # two ranks exchange their buffers in one piece
    assert counts["fp16"] == counts["bf16"] == {(halves, rounds * chunk * 2)}


@pytest.mark.parametrize("names", list(itertools.permutations([None, *NAMES], 2)))
def test_ranks_with_different_formats(spawn_ring: Spawn, names: tuple[str | None, ...]) -> None:
    def work(communicator: Communicator) -> HostOptError:
        local = np.ones(8, np.float32)
        with pytest.raises(HostOptError) as caught:
            reduce(communicator, local, names[communicator.rank])
        communicator.abort(caught.value)
        return caught.value

    for error in spawn_ring(2, work):
        assert isinstance(error, CollectiveMismatchError)
        for name in names:
            shown = "float32[8]" if name is None else f"float32[8] as {name}"
            assert f"calls all_reduce(sum) of 'the gradients' {shown}" in str(error)


# --- the reducer ------------------------------------------------------------------------------

LENGTH = 48  # whole 64 bytes of each dtype
SPECS = [
    TensorSpec(f"v{i}", (LENGTH,), np.dtype(dtype)) for i, dtype in enumerate(["f4", "f8", "i4"])
]


@pytest.mark.parametrize("name", [None, *NAMES])
def test_the_reducer_compresses_float32(spawn_ring: Spawn, name: str | None) -> None:
    size, buckets = 3, plan_buckets(SPECS, 1 << 20)
    data = {  # in the order of the buckets
        "i4": np.arange(size * LENGTH, dtype="i4").reshape(size, LENGTH),
        "f8": gradients(size, LENGTH, seed=1).astype("f8") / 3,
        "f4": gradients(size, LENGTH, seed=2),
    }

    def work(communicator: Communicator) -> tuple[dict[str, Array], int]:
        reducer = Reducer(communicator, buckets, NonFiniteCheck(communicator))
        for index, rows in enumerate(data.values()):
            reducer.launch(index, [rows[communicator.rank]])
        result = {dtype: reducer.wait(index)[0].copy() for index, dtype in enumerate(data)}
        reducer.close()
        return result, communicator.transport.traffic.payload_bytes

    # behind each bucket travels a mark, of 64 bytes in memory
    with_marks = [(LENGTH + 16) * 4, (LENGTH + 8) * 8, (LENGTH + 16) * (2 if name else 4)]
    results = spawn_ring(size, work, compression=name)
    assert sum(sent for _, sent in results) == 2 * (size - 1) * sum(with_marks)
    for result, _ in results:
        np.testing.assert_array_equal(result["i4"], data["i4"].sum(axis=0))
        np.testing.assert_allclose(result["f8"], data["f8"].sum(axis=0), rtol=1e-14)
        if name is not None:
            marked = np.pad(data["f4"], [(0, 0), (0, 16)])
            same_bits(result["f4"], emulated(marked, name)[:LENGTH])


@pytest.mark.parametrize("name", NAMES)
def test_the_option_changes_nothing_else(spawn_ring: Spawn, name: str) -> None:
    value = 1 + 2**-20  # not representable in either format

    def work(communicator: Communicator) -> list[Any]:
        local = np.full(5, value, np.float32)
        return [
            communicator.all_reduce(local),
            communicator.reduce_scatter(local)[:1],
            communicator.all_gather(local)[0],
            communicator.broadcast(local),
        ]

    for reduced, scattered, gathered, sent in spawn_ring(2, work, compression=name):
        assert set(reduced) == set(scattered) == {np.float32(2 * value)}
        assert set(gathered) == set(sent) == {np.float32(value)}


def test_each_stream_has_its_own_scratch_memory() -> None:
    wire_format = new_wire_format("fp16")
    assert wire_format is not None
    formats = [wire_format.of(stream) for stream in range(16)]
    assert len({id(each) for each in formats}) == 16
    assert formats[0] is wire_format
    assert formats[3] is wire_format.of(3)
    assert all(len(each._of_streams) == 0 for each in formats[1:])
