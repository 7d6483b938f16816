"""The file `model.ckpt-N.input`: states of the input iterators of all ranks, with a checksum.

::

    16 bytes  "hostopt input 2\\n": format, whose number changes with anything below
     8 bytes  length of everything after the checksum
    32 bytes  SHA-256 of everything after it
     8 bytes  length of the header
              header: JSON with "facts" (attributes) and "lengths"
              byte strings of those lengths, one after the other

The byte strings are the positions of the ranks. Each has the same layout, from the length of the
header on. It has the attribute "pipelines" (the fingerprint of each iterator), and one of:

- "parts" (the number of parts of each iterator's state); its byte strings are the parts;
- "batches" (the number of batches that were read) and "checksum" (of the last one); it has no
  byte strings.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

import hostopt
from estimator_ext.checkpoints.file_errors import cause, replace_file

SUFFIX = ".input"
_VERSION = 2
_FORMAT = b"hostopt input %d\n" % _VERSION
_ANY_FORMAT = re.compile(rb"hostopt input ([1-9]\d*)\n")
_NUMBER_BYTES = 8
_PREFIX_BYTES = len(_FORMAT) + _NUMBER_BYTES + hashlib.sha256().digest_size


class Packed(NamedTuple):
    """Byte strings with attributes."""

    attributes: dict[str, Any]
    parts: list[bytes]


def pack(attributes: dict[str, Any], parts: Sequence[bytes]) -> bytes:
    """Packs byte strings and a JSON object that describes them into one, without a checksum."""
    header = json.dumps({"facts": attributes, "lengths": [*map(len, parts)]}).encode()
    return b"".join([_number(len(header)), header, *parts])


def unpack(data: bytes | memoryview) -> Packed:
    """Unpacks the result of `pack`, or raises a ValueError; needs as much memory as the data."""
    end = _NUMBER_BYTES + int.from_bytes(data[:_NUMBER_BYTES], "little")
    if end > len(data):
        raise ValueError("its header is truncated")
    try:
        header = json.loads(bytes(data[_NUMBER_BYTES:end]))
        attributes, lengths = header["facts"], header["lengths"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError("its header is invalid") from error
    if not isinstance(attributes, dict) or not _is_counts(lengths):
        raise ValueError("its header is invalid")
    if end + sum(lengths) != len(data):
        raise ValueError(f"it has {len(data)} bytes, wanted {end + sum(lengths)}")
    parts = []
    for length in lengths:
        parts.append(bytes(data[end : end + length]))
        end += length
    return Packed(attributes, parts)


def step_of(checkpoint: str) -> str:
    """Returns the step at the end of the name of a checkpoint."""
    return checkpoint.rpartition("-")[2]


def write(checkpoint: str, attributes: dict[str, Any], states: Sequence[bytes]) -> None:
    """Writes the states of all ranks beside a checkpoint, atomically.

    The attributes are "process", which identifies the process that writes, and "step", the result
    of `step_of`. The packed state of a rank that has none is b"".
    """
    body = pack(attributes, states)
    replace_file(f"{checkpoint}{SUFFIX}", [_prefix(body), body])


def read(checkpoint: str) -> Packed | None:
    """Reads what `write` wrote; needs twice the memory of the file.

    Returns None if there is no such file, and raises a CheckpointError if it is damaged or has the
    format of another release.
    """
    path = f"{checkpoint}{SUFFIX}"
    check_format(checkpoint)
    try:
        if not tf.io.gfile.exists(path):
            return None
        packed = unpack(_read_checked(path))
        if not _is_of(checkpoint, packed):
            raise ValueError("its states are not those of this checkpoint")
    except (tf.errors.OpError, ValueError) as error:
        raise hostopt.CheckpointError(
            f"{path}, the input state of {checkpoint}, is damaged: {cause(error)}. Remove it to "
            "read the data from the beginning, or resume from another checkpoint"
        ) from error
    return packed


def check_format(checkpoint: str) -> None:
    """Raises a CheckpointError if the file of a checkpoint has the format of another release."""
    path, begin = f"{checkpoint}{SUFFIX}", b""
    with contextlib.suppress(tf.errors.OpError), tf.io.gfile.GFile(path, "rb") as file:
        begin = file.read(_PREFIX_BYTES)
    match = _ANY_FORMAT.match(begin)
    if match is not None and match[0] != _FORMAT:
        raise hostopt.CheckpointError(
            f"{path}, the input state of {checkpoint}, has format {int(match[1])}, and hostopt "
            f"{hostopt.__version__} reads format {_VERSION}. Resume with the release of hostopt "
            "that wrote it, or remove it to read the data from the beginning"
        )


def _is_of(checkpoint: str, packed: Packed) -> bool:
    attributes, states = packed
    return (
        attributes.keys() == {"process", "step"}
        and attributes["step"] == step_of(checkpoint)
        and bool(states)
        and all(not state or _is_state(unpack(state)) for state in states)
    )


def _is_state(packed: Packed) -> bool:
    attributes, parts = packed
    if attributes.keys() == {"pipelines", "batches", "checksum"}:
        return (
            _is_counts(attributes["pipelines"])
            and _is_counts([attributes["batches"], attributes["checksum"]])
            and not parts
        )
    return (
        attributes.keys() == {"pipelines", "parts"}
        and _is_counts(attributes["pipelines"])
        and _is_counts(attributes["parts"])
        and len(attributes["parts"]) == len(attributes["pipelines"])
        and sum(attributes["parts"]) == len(parts)
    )


def _is_counts(value: Any) -> bool:
    """True if a JSON value is a list of non-negative integers."""
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _number(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "little")


def _prefix(body: bytes | memoryview) -> bytes:
    return _FORMAT + _number(len(body)) + hashlib.sha256(body).digest()


def _read_checked(path: str) -> memoryview:
    """Reads and verifies the checksummed part of a file, unless the file has a wrong length."""
    with tf.io.gfile.GFile(path, "rb") as file:
        prefix = file.read(_PREFIX_BYTES)
        if not prefix.startswith(_FORMAT):
            raise ValueError("it does not begin as an input state")
        length = int.from_bytes(prefix[len(_FORMAT) :][:_NUMBER_BYTES], "little")
        if file.size() != _PREFIX_BYTES + length:
            raise ValueError(f"it has {file.size()} bytes, wanted {_PREFIX_BYTES + length}")
        body = memoryview(file.read(length))
    if _prefix(body) != prefix:
        raise ValueError("its checksum does not match")
    return body
