"""Sums of quantized arrays, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from rings import Spawn

from hostopt.collectives.communicator import Communicator
from hostopt.errors import ProtocolError
from hostopt.gradients import quantized
from hostopt.gradients.quantized import QuantizedSum, encode

LARGEST = {8: 127, 4: 7}


def decode(encoded: bytes, size: int, bits: int) -> np.ndarray:
    parts = quantized._parts(encoded, size, bits)
    begins = range(0, len(parts[0]), quantized._BLOCK_ROWS)
    blocks = [quantized._decoded(*parts, begin, bits) for begin in begins]
    return np.concatenate([np.empty(0, np.float32), *blocks])[:size]


def values_of(rank: int, size: int = 700) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("bits", LARGEST)
@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 700])
def test_values_are_rounded_to_the_nearest_step_of_their_row(bits: int, size: int) -> None:
    values = values_of(0, size)
    decoded = decode(encode(values, bits), size, bits)
    assert decoded.shape == values.shape
    for begin in range(0, size, 256):
        row = slice(begin, begin + 256)
        step = np.abs(values[row]).max() / LARGEST[bits]
        assert np.abs(decoded[row] - values[row]).max() <= step * 0.5001


@pytest.mark.parametrize("bits", LARGEST)
def test_zeros_and_tiny_values(bits: int) -> None:
    zeros = np.zeros(300, np.float32)
    np.testing.assert_array_equal(decode(encode(zeros, bits), 300, bits), zeros)
    tiny = np.full(300, 1e-45, np.float32)  # the scale underflows to 0
    assert np.isfinite(decode(encode(tiny, bits), 300, bits)).all()


@pytest.mark.parametrize(("bits", "nbytes"), [(8, 2 * 4 + 512), (4, 2 * 4 + 256)])
def test_the_number_of_bytes(bits: int, nbytes: int) -> None:
    encoded = encode(values_of(0, 512), bits)
    assert len(encoded) == nbytes
    with pytest.raises(ProtocolError, match=f"expected {nbytes} bytes"):
        decode(encoded[:-1], 512, bits)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_what_is_left_out_is_sent_later(spawn: Spawn, name: str, size: int) -> None:
    def work(communicator: Communicator) -> tuple[np.ndarray, np.ndarray]:
        quantized = QuantizedSum(communicator, name)
        total = np.zeros(700, np.float32)
        for _ in range(10):
            values = values_of(communicator.rank)
            quantized.sum_in_place(values, "values")
            total += values
        residual = quantized.take_residual()
        return total, communicator.all_reduce(residual) + total

    results = spawn(size, work)
    expected = 10 * np.sum([values_of(rank) for rank in range(size)], axis=0)
    for total, with_residual in results:
        np.testing.assert_array_equal(total, results[0][0])
        np.testing.assert_allclose(with_residual, expected, rtol=0, atol=1e-4)


def test_a_residual_is_taken_once(spawn_inproc: Spawn) -> None:
    def work(communicator: Communicator) -> None:
        quantized = QuantizedSum(communicator, "int4")
        assert quantized.take_residual() == 0.0
        quantized.sum_in_place(values_of(0), "values")
        assert np.abs(quantized.take_residual()).max() > 0
        assert quantized.take_residual() == 0.0

    spawn_inproc(1, work)
