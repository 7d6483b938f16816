"""Sums of float32 arrays that travel as small integers, with error feedback.

What the rounding leaves out is added to the values of the next sum, so that no part of them is
lost (Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019, "Error
Feedback Fixes SignSGD"). Each rank sends its integers to all others, and all of them add the same
values in the order of the ranks, in float32.
"""

from __future__ import annotations

import numpy as np

from hostopt.collectives.call import Array
from hostopt.collectives.communicator import Communicator
from hostopt.errors import ProtocolError

_ROW = 256  # values that share a scale
_BLOCK_ROWS = 1024  # rows that are rounded at a time, so that they stay in the processor's cache
_BITS = {"int8": 8, "int4": 4}
NAMES = tuple(_BITS)


class QuantizedSum:
    """Sums arrays of one shape over the ranks, again and again, as "int8" or "int4"."""

    def __init__(self, communicator: Communicator, name: str) -> None:
        self._communicator = communicator
        self._bits = _BITS[name]
        self._residual: Array | None = None

    def sum_in_place(self, values: Array, name: str) -> None:
        """Sums finite float32 values [n]. Collective: all ranks must call it."""
        if self._residual is not None:
            values += self._residual
        encoded = encode(values, self._bits)
        gathered = self._communicator.all_gather_bytes(encoded, name)
        parts = [_parts(received, values.size, self._bits) for received in gathered]
        self._residual = np.empty_like(values)
        for begin in range(0, -(-values.size // _ROW), _BLOCK_ROWS):
            block = slice(begin * _ROW, (begin + _BLOCK_ROWS) * _ROW)
            local = values[block]
            decoded = [_decoded(*part, begin, self._bits)[: local.size] for part in parts]
            np.subtract(local, decoded[self._communicator.rank], out=self._residual[block])
            local[:] = 0
            for each in decoded:
                local += each

    def take_residual(self) -> Array | float:
        """Returns what earlier sums have left out, and forgets it; 0 if there is nothing."""
        residual, self._residual = self._residual, None
        return 0.0 if residual is None else residual


def encode(values: Array, bits: int) -> bytes:
    """Rounds finite float32 values [n] to integers of 8 or 4 bits.

    Returns float32 scales, one for each row, then the integers. With 4 bits two make a byte.
    """
    largest = np.float32((1 << (bits - 1)) - 1)
    count = -(-values.size // _ROW)
    scales = np.empty((count, 1), np.float32)
    integers = np.empty((count, _ROW * bits // 8), np.uint8)
    for begin in range(0, count, _BLOCK_ROWS):
        block = slice(begin, begin + _BLOCK_ROWS)
        rows = values[begin * _ROW : (begin + _BLOCK_ROWS) * _ROW]
        if rows.size % _ROW:
            rows = np.pad(rows, (0, -rows.size % _ROW))
        rows = rows.reshape(-1, _ROW)
        np.divide(np.abs(rows).max(axis=1, keepdims=True), largest, out=scales[block])
        # a scale of 0 means zeros, or values that are too small for one
        scaled = rows / np.where(scales[block] > 0, scales[block], np.float32(1))
        np.clip(np.rint(scaled, out=scaled), -largest, largest, out=scaled)
        integers[block] = _packed(scaled.astype(np.int8), bits)
    encoded: bytes = scales.tobytes() + integers.tobytes()
    return encoded


def _packed(integers: Array, bits: int) -> Array:
    if bits == 8:
        return integers.view(np.uint8)
    nibbles = (integers + np.int8(8)).view(np.uint8)
    return nibbles[:, ::2] | nibbles[:, 1::2] << np.uint8(4)


def _parts(encoded: bytes, size: int, bits: int) -> tuple[Array, Array]:
    """Returns the scales, of shape [rows, 1], and the bytes of each row."""
    count = -(-size // _ROW)
    wanted = 4 * count + count * _ROW * bits // 8
    if len(encoded) != wanted:
        raise ProtocolError(
            f"expected {wanted} bytes of {size} quantized values, got {len(encoded)}. Run the "
            "same version of hostopt on all ranks"
        )
    scales = np.frombuffer(encoded, np.float32, count).reshape(-1, 1)
    data = np.frombuffer(encoded, np.uint8, offset=4 * count)
    return scales, data.reshape(-1, _ROW * bits // 8)


def _decoded(scales: Array, data: Array, begin: int, bits: int) -> Array:
    """Returns the values of a block of rows, which begins with row `begin`."""
    rows = slice(begin, begin + _BLOCK_ROWS)
    packed = data[rows]
    if bits == 4:
        integers: Array = np.empty((len(packed), _ROW), np.int8)
        integers[:, ::2], integers[:, 1::2] = packed & np.uint8(15), packed >> np.uint8(4)
        integers -= np.int8(8)
    else:
        integers = packed.view(np.int8)
    decoded: Array = (integers * scales[rows]).reshape(-1)
    return decoded
