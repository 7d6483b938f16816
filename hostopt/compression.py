"""Wire formats: float32 gradients travel as fp16 or bf16, half the bytes; sums stay float32.

Both round to the nearest value, ties to even; what is too large becomes an infinity, and a NaN
stays one. Conversions must not hold the ring up: they work on blocks that stay in the cache.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

__all__: list[str] = []

Array = np.ndarray[Any, Any]

_BLOCK = 1 << 16  # elements; fewer would cost calls, and more would leave the cache
_FLOAT32 = np.dtype(np.float32)
_UINT32 = np.dtype(np.uint32)


class WireFormat(abc.ABC):
    """How the values of a buffer travel; has scratch memory, so it belongs to one thread.

    Args:
      name: its name in `Options.compression`; part of the signature that ranks compare.
      dtype: dtype of a value on the wire.
    """

    def __init__(self, name: str, dtype: np.dtype[Any]) -> None:
        self.name = name
        self.dtype = dtype

    @abc.abstractmethod
    def encode(self, values: Array) -> Array:
        """Round to the wire format.

        Args:
          values: contiguous array of shape [n].

        Returns:
          Array of shape [n] and `dtype`, which holds until the next call.
        """

    @abc.abstractmethod
    def decode(self, wire: Array, out: Array) -> None:
        """Convert back, which is exact.

        Args:
          wire: contiguous array of shape [n] and `dtype`.
          out: contiguous array of shape [n], overwritten.
        """

    @abc.abstractmethod
    def combine(self, values: Array, wire: Array, ufunc: np.ufunc) -> None:
        """Combine with what arrived.

        Args:
          values: contiguous array of shape [n]; becomes ``ufunc(values, decoded wire)``.
          wire: contiguous array of shape [n] and `dtype`.
          ufunc: binary ufunc.
        """


class Whole(WireFormat):
    """No compression: values travel as they lie in memory.

    Args:
      dtype: dtype of the buffer.
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        super().__init__(dtype.name, dtype)

    def encode(self, values: Array) -> Array:
        """Return `values` itself."""
        return values

    def decode(self, wire: Array, out: Array) -> None:
        """See `WireFormat.decode`."""
        out[:] = wire

    def combine(self, values: Array, wire: Array, ufunc: np.ufunc) -> None:
        """See `WireFormat.combine`."""
        ufunc(values, wire, out=values)


class _Float32Format(WireFormat):
    """Rounds float32, block by block."""

    def __init__(self, name: str, dtype: np.dtype[Any]) -> None:
        super().__init__(name, dtype)
        self._encoded = np.empty(0, dtype)
        self._decoded = np.empty(_BLOCK, np.float32)

    def encode(self, values: Array) -> Array:
        """See `WireFormat.encode`."""
        if self._encoded.size < values.size:
            self._encoded = np.empty(values.size, self.dtype)
        encoded = self._encoded[: values.size]
        with np.errstate(all="ignore"):  # an infinity is no surprise
            for block in _blocks(values.size):
                self._encode_block(values[block], encoded[block])
        return encoded

    def decode(self, wire: Array, out: Array) -> None:
        """See `WireFormat.decode`."""
        for block in _blocks(out.size):
            self._decode_block(wire[block], out[block])

    def combine(self, values: Array, wire: Array, ufunc: np.ufunc) -> None:
        """See `WireFormat.combine`."""
        for block in _blocks(values.size):
            mine = values[block]
            theirs = self._decoded[: mine.size]
            self._decode_block(wire[block], theirs)
            ufunc(mine, theirs, out=mine)

    @abc.abstractmethod
    def _encode_block(self, values: Array, out: Array) -> None: ...

    @abc.abstractmethod
    def _decode_block(self, wire: Array, out: Array) -> None: ...


class Bf16(_Float32Format):
    """bfloat16: the range of float32, 8 bits of precision."""

    def __init__(self) -> None:
        super().__init__("bf16", np.dtype(ml_dtypes.bfloat16))

    def _encode_block(self, values: Array, out: Array) -> None:
        np.copyto(out, values, casting="unsafe")

    def _decode_block(self, wire: Array, out: Array) -> None:
        np.copyto(out, wire)


class Fp16(_Float32Format):
    """IEEE binary16: 11 bits of precision between 2**-14 and 65504, fewer down to 2**-24."""

    # numpy converts one value after the other, and slowly those below 2**-14, which many
    # gradients are. So 2**(e + 13) is added to each |x|, where 2**e <= |x| < 2**(e + 1), or e is
    # -14 where |x| is smaller. The sum has the precision that fp16 has at x, so the addition
    # rounds as IEEE says, and its last bits count the steps of 2**(e - 10) in |x|. To this number
    # fp16 adds 1024 for each e above -14, since a step of e is worth as much as its hidden bit.
    # The rest of the sum's bits, and what else is too much, vanish modulo 2**16.
    _SIGN = np.uint32(0x8000)
    _EXPONENT = np.uint32(0x7F80_0000)
    # turns the bits of 2**e into those of the number to add, whose last 16 bits make up for
    # what the shifted exponent adds too much
    _TO_ROUNDER = np.uint32((13 << 23) + (-((13 + 127 - 14) << 10) & 0xFFFF))
    _TO_FP16_EXPONENT = np.uint32(23 - 10)
    _TO_FP16_SIGN = np.uint32(16)
    _TOO_LARGE = (127 + 16) << 23  # 2**16 in float32; infinities and NaNs are above it

    def __init__(self) -> None:
        super().__init__("fp16", np.dtype(np.float16))
        self._sum = np.empty(_BLOCK, np.float32)
        self._rounder = np.empty(_BLOCK, np.uint32)
        # numpy's maximum is slow with a scalar
        self._least_exponent = np.full(_BLOCK, (127 - 14) << 23, np.uint32)
        self._indices = np.empty(_BLOCK, np.intp)

    def _encode_block(self, values: Array, out: Array) -> None:
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

    def _decode_block(self, wire: Array, out: Array) -> None:
        indices = self._indices[: out.size]
        np.copyto(indices, wire.view(np.uint16))
        # "raise" would copy; no index is out of range
        np.take(_fp16_values(), indices, out=out, mode="wrap")


def new_wire_format(compression: str | None) -> WireFormat | None:
    """Make the format of an option.

    Args:
      compression: "fp16", "bf16" or None.

    Returns:
      The format, for one thread; None for no compression.
    """
    formats = {"fp16": Fp16, "bf16": Bf16}
    return None if compression is None else formats[compression]()


@functools.cache
def _fp16_values() -> Array:
    """Every fp16 value in the order of its bits, float32 [65536]."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def _blocks(length: int) -> Iterator[slice]:
    for start in range(0, length, _BLOCK):
        yield slice(start, start + _BLOCK)
