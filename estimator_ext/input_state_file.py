"""The file `model.ckpt-N.input`: byte strings and facts about them, under one checksum.

::

    16 bytes  "hostopt input 2\\n": which format this is
     8 bytes  length of all that follows the checksum
    32 bytes  SHA-256 of it
     8 bytes  length of the header
              header: JSON with "facts" and "lengths"
              byte strings, one after the other, of those lengths
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

import hostopt
from estimator_ext.file_errors import cause, write_whole

__all__: list[str] = []

SUFFIX = ".input"
_FORMAT = b"hostopt input 2\n"
_NUMBER_BYTES = 8
_PREFIX_BYTES = len(_FORMAT) + _NUMBER_BYTES + hashlib.sha256().digest_size


class Packed(NamedTuple):
    """What was packed together.

    Args:
      facts: as JSON can hold them.
      parts: byte strings.
    """

    facts: dict[str, Any]
    parts: list[bytes]


def pack(facts: dict[str, Any], parts: Sequence[bytes]) -> bytes:
    """Make one byte string of several, without a checksum.

    Args:
      facts: what is to be known of them, as JSON can hold it.
      parts: the byte strings.

    Returns:
      One, from which `unpack` makes the same again.
    """
    header = json.dumps({"facts": facts, "lengths": [*map(len, parts)]}).encode()
    return b"".join([_number(len(header)), header, *parts])


def unpack(data: bytes | memoryview) -> Packed:
    """The inverse of `pack`; takes as much memory as the data.

    Args:
      data: what `pack` has returned.

    Returns:
      Facts and parts.

    Raises:
      ValueError: it is anything else.
    """
    end = _NUMBER_BYTES + int.from_bytes(data[:_NUMBER_BYTES], "little")
    if end > len(data):
        raise ValueError("its header is cut")
    try:
        header = json.loads(bytes(data[_NUMBER_BYTES:end]))
        facts, lengths = header["facts"], header["lengths"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError("its header is no such header") from error
    if not isinstance(facts, dict) or not is_counts(lengths):
        raise ValueError("its header is no such header")
    if end + sum(lengths) != len(data):
        raise ValueError(f"it has {len(data)} bytes, wanted {end + sum(lengths)}")
    parts = []
    for length in lengths:
        parts.append(bytes(data[end : end + length]))
        end += length
    return Packed(facts, parts)


def is_counts(found: Any) -> bool:
    """Whether something is a list of whole numbers from 0 on.

    Args:
      found: what JSON has held.

    Returns:
      True if so.
    """
    return isinstance(found, list) and all(type(n) is int and n >= 0 for n in found)


def write(checkpoint: str, facts: dict[str, Any], parts: Sequence[bytes]) -> None:
    """Write the file beside a checkpoint, as a whole or not at all.

    Args:
      checkpoint: its path.
      facts: what is to be known of the parts, as JSON can hold it.
      parts: byte strings.

    Raises:
      hostopt.CheckpointError: it cannot be written.
    """
    body = pack(facts, parts)
    write_whole(f"{checkpoint}{SUFFIX}", [_prefix(body), body])


def read(checkpoint: str, is_valid: Callable[[Packed], bool]) -> Packed | None:
    """Read the file beside a checkpoint; takes twice as much memory as was written.

    Args:
      checkpoint: its path.
      is_valid: whether the facts are those that the writer would have written.

    Returns:
      Facts and parts; None where there is no such file.

    Raises:
      hostopt.CheckpointError: the file cannot be read, or is damaged.
    """
    path = f"{checkpoint}{SUFFIX}"
    try:
        if not tf.io.gfile.exists(path):
            return None
        found = unpack(_read_checked(path))
        if not is_valid(found):
            raise ValueError("its facts are none of this checkpoint's")
    except (tf.errors.OpError, ValueError) as error:
        raise hostopt.CheckpointError(
            f"{path}, which says how far the data of {checkpoint} were read, is damaged: "
            f"{cause(error)}. Remove it to have the data begin anew, or go on from another "
            "checkpoint"
        ) from error
    return found


def _number(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "little")


def _prefix(body: bytes | memoryview) -> bytes:
    return _FORMAT + _number(len(body)) + hashlib.sha256(body).digest()


def _read_checked(path: str) -> memoryview:
    """What the checksum covers; nothing of a file that is too long is read."""
    with tf.io.gfile.GFile(path, "rb") as file:
        prefix = file.read(_PREFIX_BYTES)
        if not prefix.startswith(_FORMAT):
            raise ValueError("it has another format, such as that of an earlier release")
        length = int.from_bytes(prefix[len(_FORMAT) :][:_NUMBER_BYTES], "little")
        if file.size() != _PREFIX_BYTES + length:
            raise ValueError(f"it has {file.size()} bytes, wanted {_PREFIX_BYTES + length}")
        body = memoryview(file.read(length))
    if _prefix(body) != prefix:
        raise ValueError("its checksum is another one")
    return body
