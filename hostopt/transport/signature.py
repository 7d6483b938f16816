"""What a collective call is, for the other ranks: its kind, name, dtype, shape and wire format."""

from __future__ import annotations

import functools
import zlib
from typing import Any, NamedTuple

__all__: list[str] = []


class Signature(NamedTuple):
    """What must be the same on all ranks.

    Args:
      text: for people, such as ``all_reduce(sum) of 'dense/kernel' float32[2, 3]``.
      checksum: CRC-32 of the text, which travels with each message.
    """

    text: str
    checksum: int


UNSIGNED = Signature("", 0)


@functools.lru_cache(maxsize=4096)  # the same few calls are made in every step
def signature_of(
    kind: str,
    what: str = "",
    dtype: Any = None,
    shape: tuple[int, ...] = (),
    travels_as: str = "",
) -> Signature:
    """Describe a call.

    Args:
      kind: which collective, with its operation or root.
      what: name of what it carries.
      dtype: its numpy dtype; None for bytes, whose number differs by rank.
      shape: its shape.
      travels_as: name of the wire format; empty if it travels as it is.

    Returns:
      The signature.
    """
    words = [kind]
    if what:
        words += ["of", what if "'" in what else repr(what)]
    if dtype is not None:
        words.append(f"{dtype.name}{list(shape)}")
    if travels_as:
        words += ["as", travels_as]
    text = " ".join(words)
    return Signature(text, zlib.crc32(text.encode()))
