"""The signature of a collective call: its kind, name, dtype, shape and wire format."""

from __future__ import annotations

import functools
import zlib
from typing import Any, NamedTuple


class Signature(NamedTuple):
    """Describes a call; it must be the same on all ranks."""

    text: str  # for errors, such as: all_reduce(sum) of 'dense/kernel' float32[2, 3]
    checksum: int  # CRC-32 of the text, which each message carries


UNSIGNED = Signature("", 0)


@functools.lru_cache(maxsize=4096)  # the same few calls are made in every step
def signature_of(
    kind: str,  # the collective, with its reduce operation or root
    name: str = "",
    dtype: Any = None,  # of numpy; None for bytes, whose number may differ by rank
    shape: tuple[int, ...] = (),
    wire_format: str = "",
) -> Signature:
    """Describes a call."""
    words = [kind]
    if name:
        words += ["of", name if "'" in name else repr(name)]
    if dtype is not None:
        words.append(f"{dtype.name}{list(shape)}")
    if wire_format:
        words += ["as", wire_format]
    text = " ".join(words)
    return Signature(text, zlib.crc32(text.encode()))
