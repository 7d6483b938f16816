"""Whether values are finite, at the speed of the cache, and which gradients are not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

from hostopt.ring import Array

__all__: list[str] = []

# numpy looks at each of these by itself: that is ten times as slow as a look at the bits of an
# exponent, which are all set in an infinity and in a NaN
_EXPONENTS = {np.dtype(np.float16): 0x7C00, np.dtype(ml_dtypes.bfloat16): 0x7F80}
_BLOCK = 1 << 16  # elements; fewer would cost calls, and more would leave the cache


def all_finite(values: Array) -> bool:
    """Whether there is neither NaN nor Inf in an array.

    Args:
      values: contiguous array of any shape; whole numbers are finite.

    Returns:
      True where all of it is finite.
    """
    flat = values.reshape(-1)
    if flat.dtype in _EXPONENTS:
        exponent, bits = np.uint16(_EXPONENTS[flat.dtype]), flat.view(np.uint16)
        starts = range(0, flat.size, _BLOCK)
        return all((bits[i : i + _BLOCK] & exponent).max() < exponent for i in starts)
    if flat.dtype.kind != "f":
        return True
    # of all that numpy has this sum reads fastest; where it overflows it is not finite either
    return math.isfinite(np.einsum("i->", flat)) or bool(np.isfinite(flat).all())


def troubles(names: Sequence[str], arrays: Sequence[Array]) -> dict[str, str]:
    """Which gradients are not finite.

    Args:
      names: the names of their variables.
      arrays: the gradients.

    Returns:
      "NaN" or "Inf" by name, for those which hold one.
    """
    return {
        name: "NaN" if np.isnan(array).any() else "Inf"
        for name, array in zip(names, arrays)
        if not all_finite(array)
    }


def explain(
    what: str,
    step: int,
    found: Mapping[str, Mapping[str, str]],
    sums: Mapping[str, str],
    travels_as: str | None = None,
) -> str:
    """Say whose gradients are not finite; the same text on all ranks.

    Args:
      what: what was reduced.
      step: number of the step, from 0.
      found: by the name of a rank, what `troubles` found in its own gradients.
      sums: what it finds in the sums.
      travels_as: the wire format, where sums may overflow in it.

    Returns:
      Text for an error or a warning.
    """
    blamed = [
        f"{rank} has {', '.join(f'{kind} for {name!r}' for name, kind in names.items())}"
        for rank, names in found.items()
        if names
    ]
    text = f"not finite in step {step} (counted from 0 since the start), summing {what}: "
    if blamed:
        return text + "; ".join(blamed)
    wire = f", or their {travels_as} form on the wire," if travels_as else ""
    overflown = ", ".join(f"{kind} for {name!r}" for name, kind in sums.items())
    return (
        f"{text}the gradients of every rank are finite, but their sum{wire} has overflowed: "
        f"{overflown}"
    )
