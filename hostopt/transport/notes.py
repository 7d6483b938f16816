"""Notes in JSON, of ranks and of strangers: each is whole and has its shape, or a ValueError."""

from __future__ import annotations

import json
from typing import Any

from hostopt.errors import HostOptError, error_from_dict
from hostopt.shapes import Each, Or, has_shape
from hostopt.transport.limits import NOTE_DEPTH

__all__: list[str] = []

_ERROR = {"kind": str, "message": str, "facts": dict}
_TAG = (int,) * 7
_LEAVE = {"sender": int, "from": str, "to": Or(str, None)}
_QUESTION = {"waiting": int, "tag": _TAG}
_STATUS = {
    "incarnation": str,
    "error": Or(_ERROR, None),
    "waits": Each({"peer": int, "what": str, "tag": _TAG, "for_s": float}),
    "sends": Each({"peer": int, "for_s": float}),
    "last": Or({"what": str, "step": int, "ago_s": float}, None),
}
_ANSWER = {
    **_STATUS,
    "sent": bool,
    "call": Or({"step": int, "bucket": int, "signature": str, "checksum": int}, None),
}


def read_note(data: bytes, most_bytes: int) -> dict[str, Any]:
    """Read an object of JSON.

    Args:
      data: what has been sent.
      most_bytes: how long it may be.

    Returns:
      The object, whose texts can be written anywhere.

    Raises:
      ValueError: it is none, or too long, or deep.
    """
    if len(data) > most_bytes:
        raise ValueError(f"a note of {len(data)} bytes, wanted {most_bytes} at most")
    try:
        note = json.loads(data)
        if b"\\ud" in data.lower():  # half a character, which UTF-8 cannot hold
            note = json.loads(json.dumps(note, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("a note that is too deep") from None
    if not isinstance(note, dict):
        raise ValueError("a note that is no object")
    _check_depth(note)
    return note


def read_question(data: bytes, most_bytes: int) -> dict[str, Any]:
    """Read the request of `Status` by a rank that waits; arguments as for `read_note`."""
    return _with_shape(read_note(data, most_bytes), _QUESTION)


def read_status(data: bytes, most_bytes: int, size: int, *, asked: bool) -> dict[str, Any]:
    """Read the answer of `Status`.

    Args:
      data: what has been sent.
      most_bytes: how long it may be.
      size: number of ranks, which all that it names are.
      asked: whether a `read_question` was sent.

    Returns:
      What `stall.status_of` says of a peer, its incarnation, and the answer to the question.

    Raises:
      ValueError: it is no such note.
    """
    status = _with_shape(read_note(data, most_bytes), _ANSWER if asked else _STATUS)
    if any(not 0 <= each["peer"] < size for each in status["waits"] + status["sends"]):
        raise ValueError("a status that names no rank of this ring")
    return status


def read_leave(data: bytes, most_bytes: int) -> tuple[dict[str, Any], HostOptError | None]:
    """Read the request of `Leave`.

    Args:
      data: what has been sent.
      most_bytes: how long it may be.

    Returns:
      The note, and the error in it; None where there is none.

    Raises:
      ValueError: it is no such note.
    """
    note = _with_shape(read_note(data, most_bytes), _LEAVE)
    return note, error_from_dict(note["error"]) if "error" in note else None


def _with_shape(note: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    if not has_shape(note, shape):
        raise ValueError("a note that lacks something, or has it as another type")
    return note


def _check_depth(note: dict[str, Any]) -> None:
    parts: list[Any] = [note]
    for _ in range(NOTE_DEPTH):
        inner = [list(part.values()) if isinstance(part, dict) else part for part in parts]
        parts = [each for part in inner for each in part if isinstance(each, (dict, list))]
        if not parts:
            return
    raise ValueError("a note that is too deep")
