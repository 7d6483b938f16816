"""Wire formats: float32 gradients are sent as fp16 or bf16, which halves the bytes.

Both round to nearest, ties to even. Values that are too large become infinities, and NaNs stay
NaNs. Conversions of fp16 work on blocks that stay in the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from hostopt.collectives.call import Array

_BLOCK = 1 << 16  # elements; smaller blocks cost more calls, larger ones leave the cache
_FLOAT32 = np.dtype(np.float32)
_UINT32 = np.dtype(np.uint32)


class WireFormat:
    """Encoding of the values of a buffer on the wire, for contiguous arrays of shape [n].

    Values that have the dtype of the wire already are sent unchanged. Others need scratch memory:
    use the format in one thread, and `of` in the threads of streams. The `name` is that of
    `Options.compression`, and part of the signature that ranks compare.
    """

    def __init__(self, name: str, dtype: np.dtype[Any]) -> None:
        self.name = name
        self.dtype = dtype
        self._encoded = np.empty(0, dtype)
        self._of_streams: dict[int, WireFormat] = {}

    def of(self, stream: int) -> WireFormat:
        """Returns the same format with the scratch memory of a stream; of stream 0, itself."""
        if stream and stream not in self._of_streams:
            self._of_streams[stream] = type(self)(self.name, self.dtype)
        return self._of_streams.get(stream, self)

    def encode(self, values: Array) -> Array:
        """Returns the values rounded to the wire format, valid until the next call."""
        if values.dtype == self.dtype:
            return values
        if self._encoded.size < values.size:
            self._encoded = np.empty(values.size, self.dtype)
        encoded = self._encoded[: values.size]
        with np.errstate(all="ignore"):  # overflow to infinity is expected
            self._round(values, encoded)
        return encoded

    def decode(self, encoded: Array, out: Array) -> None:
        """Converts encoded values back, exactly."""
        out[:] = encoded

    def reduce(self, values: Array, encoded: Array, op: np.ufunc) -> None:
        """Overwrites values with ``op(values, decoded)``."""
        op(values, encoded, out=values)

    def _round(self, values: Array, out: Array) -> None:
        np.copyto(out, values, casting="unsafe")


@functools.lru_cache(maxsize=64)
def no_compression(dtype: np.dtype[Any]) -> WireFormat:
    """Returns the format that sends values of a dtype unchanged; for any thread."""
    return WireFormat(dtype.name, dtype)


class Fp16(WireFormat):
    """IEEE binary16: 11 bits of precision from 2**-14 to 65504, fewer down to 2**-24."""

    # numpy converts value by value, and is slow below 2**-14, a common size of gradients. So the
    # conversion is done with array operations on the bits:
    #
    # 1. Let e be the exponent of x, 2**e <= |x| < 2**(e + 1), but at least -14. Add 2**(e + 13)
    #    to |x|. The last bit of the float32 sum is worth 2**(e - 10), as in fp16 at x. So the
    #    addition rounds as IEEE 754 requires, and the last bits of the sum are the number of
    #    steps of 2**(e - 10) in |x|.
    # 2. The bits of an fp16 number are that number of steps, plus 1024 for each e above -14: the
    #    hidden bit is among the steps and counts as one exponent.
    # 3. The exponent bits of the sum, and all other bits above 16, vanish modulo 2**16.
    _SIGN = np.uint32(0x8000)
    _EXPONENT = np.uint32(0x7F80_0000)
    # Turns the bits of 2**e into those of the number to add in step 1. Its last 16 bits
    # compensate for the excess that step 2 adds with the shifted, biased exponent.
    _TO_ROUNDER = np.uint32((13 << 23) + (-((13 + 127 - 14) << 10) & 0xFFFF))
    _TO_FP16_EXPONENT = np.uint32(23 - 10)
    _TO_FP16_SIGN = np.uint32(16)
    _TOO_LARGE = (127 + 16) << 23  # 2**16 in float32; infinities and NaNs are above it

    def __init__(self, name: str, dtype: np.dtype[Any]) -> None:
        super().__init__(name, dtype)
        self._decoded = np.empty(_BLOCK, np.float32)
        self._sum = np.empty(_BLOCK, np.float32)
        self._rounder = np.empty(_BLOCK, np.uint32)
        # an array, because numpy's maximum is slow with a scalar
        self._least_exponent = np.full(_BLOCK, (127 - 14) << 23, np.uint32)
        self._indices = np.empty(_BLOCK, np.intp)

    def decode(self, encoded: Array, out: Array) -> None:
        """See `WireFormat.decode`."""
        for block in _blocks(out.size):
            self._decode_block(encoded[block], out[block])

    def reduce(self, values: Array, encoded: Array, op: np.ufunc) -> None:
        """See `WireFormat.reduce`."""
        for block in _blocks(values.size):
            local = values[block]
            received = self._decoded[: local.size]
            self._decode_block(encoded[block], received)
            op(local, received, out=local)

    def _round(self, values: Array, out: Array) -> None:
        for block in _blocks(values.size):
            self._round_block(values[block], out[block])

    def _round_block(self, values: Array, out: Array) -> None:
        total = np.absolute(values, out=self._sum[: values.size])
        bits = total.view(_UINT32)
        if np.maximum.reduce(bits) >= self._TOO_LARGE:
            np.copyto(out, values, casting="unsafe")
            return
        rounder = np.bitwise_and(bits, self._EXPONENT, out=self._rounder[: values.size])
        np.maximum(rounder, self._least_exponent[: values.size], out=rounder)
        np.add(rounder, self._TO_ROUNDER, out=rounder)
        np.add(total, rounder.view(_FLOAT32), out=total)
        np.right_shift(rounder, self._TO_FP16_EXPONENT, out=rounder)
        np.add(bits, rounder, out=bits)
        sign = np.right_shift(values.view(_UINT32), self._TO_FP16_SIGN, out=rounder)
        np.bitwise_and(sign, self._SIGN, out=sign)
        np.add(bits, sign, out=bits)
        np.copyto(out.view(np.uint16), bits, casting="unsafe")

    def _decode_block(self, encoded: Array, out: Array) -> None:
        indices = self._indices[: out.size]
        np.copyto(indices, encoded.view(np.uint16))
        # No index is out of range. The default mode, "raise", would use a temporary array.
        np.take(_fp16_values(), indices, out=out, mode="wrap")


def new_wire_format(compression: str | None) -> WireFormat | None:
    """Creates the wire format of the option `compression`."""
    if compression is None:
        return None
    kind, dtype = _FORMATS[compression]
    return kind(compression, np.dtype(dtype))


_FORMATS: dict[str, tuple[type[WireFormat], Any]] = {
    "fp16": (Fp16, np.float16),
    "bf16": (WireFormat, ml_dtypes.bfloat16),
}


@functools.cache
def _fp16_values() -> Array:
    """Returns the value of each fp16 bit pattern, float32 [65536]."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def _blocks(length: int) -> Iterator[slice]:
    for start in range(0, length, _BLOCK):
        yield slice(start, start + _BLOCK)
