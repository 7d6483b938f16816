"""Reads JSON messages. Each has its documented fields and types, or raises ValueError."""

from __future__ import annotations

import json
from typing import Any

from hostopt.errors import HostOptError, error_from_dict
from hostopt.shapes import Each, Or, has_shape
from hostopt.transport.grpc.limits import DETAILS_BYTES, NOTE_DEPTH

_ERROR = {"kind": str, "message": str, "facts": dict}
_TAG = (int,) * 7
HELLO = {"rank": int, "incarnation": str}  # and what `HelloMessages.check` compares
LEAVE = {"sender": int, "from": str, "to": Or(str, None)}  # and "error", an _ERROR
STATUS_REQUEST = {"waiting": int, "tag": _TAG}
STATUS = {
    "incarnation": str,
    "error": Or(_ERROR, None),
    "waits": Each({"peer": int, "what": str, "tag": _TAG, "for_s": float}),
    "sends": Each({"peer": int, "for_s": float}),
    "last": Or({"what": str, "step": int, "ago_s": float}, None),
}
STATUS_FOR_MESSAGE = {
    **STATUS,
    "sent": bool,
    "call": Or({"step": int, "bucket": int, "signature": str, "checksum": int}, None),
    "refused": Or(str, None),
    "busy_s": float,
}
DETAILS = {
    "step": Or(int, None),
    "memory_bytes": Or(int, None),
    "versions": {"hostopt": str, "python": str, "tensorflow": Or(str, None)},
    "missing": Each(int),
    "wait": Or({"peer": int, "what": str, "for_s": float}, None),
    "send": Or({"peer": int, "for_s": float}, None),
    "last": Or({"what": str, "step": int, "ago_s": float}, None),
    "error": Or(str, None),
}
OVERVIEW = {"ring": Each({"task": str, "address": str}), "ranks": Each(Or(DETAILS, str))}


def read_note(data: bytes, most_bytes: int, shape: dict[str, Any]) -> dict[str, Any]:
    """Reads a JSON object of a shape; all of its texts can be encoded as UTF-8."""
    if len(data) > most_bytes:
        raise ValueError(f"a message of {len(data)} bytes, expected at most {most_bytes}")
    try:
        note = json.loads(data)
        if b"\\ud" in data.lower():  # a lone surrogate, which UTF-8 cannot represent
            note = json.loads(json.dumps(note, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("a message that is nested too deeply") from None
    if not isinstance(note, dict):
        raise ValueError("a message that is not a JSON object")
    _check_depth(note)
    if not has_shape(note, shape):
        raise ValueError("a message that lacks a field, or has a field of another type")
    return note


def read_status(data: bytes, most_bytes: int, size: int, *, for_message: bool) -> dict[str, Any]:
    """Reads the answer of a Status call: see `Transport.status_for`, or `stall.build_status`."""
    status = read_note(data, most_bytes, STATUS_FOR_MESSAGE if for_message else STATUS)
    if any(not 0 <= each["peer"] < size for each in status["waits"] + status["sends"]):
        raise ValueError("a status that names no rank of this ring")
    return status


def read_details(data: bytes, size: int) -> dict[str, Any]:
    """Reads the answer of a Details call: see `hostopt.transport.overview`."""
    details = read_note(data, DETAILS_BYTES, DETAILS)
    _check_ranks(details, size)
    return details


def read_overview(data: bytes, most_bytes: int) -> dict[str, Any]:
    """Reads the answer of an Observe call: the tasks as "ring", and their details as "ranks"."""
    overview = read_note(data, most_bytes, OVERVIEW)
    size = len(overview["ring"])
    if len(overview["ranks"]) != size:
        raise ValueError("an overview that lacks a rank")
    for details in overview["ranks"]:
        if not isinstance(details, str):
            _check_ranks(details, size)
    return overview


def _check_ranks(details: dict[str, Any], size: int) -> None:
    peers = [details[key]["peer"] for key in ("wait", "send") if details[key]]
    if any(not 0 <= peer < size for peer in peers + details["missing"]):
        raise ValueError("details that name no rank of this ring")


def read_leave(data: bytes, most_bytes: int) -> tuple[dict[str, Any], HostOptError | None]:
    """Reads a Leave message; returns it, and the error in it or None."""
    note = read_note(data, most_bytes, LEAVE)
    return note, error_from_dict(note["error"]) if "error" in note else None


def _check_depth(note: dict[str, Any]) -> None:
    parts: list[Any] = [note]
    for _ in range(NOTE_DEPTH):
        inner = [list(part.values()) if isinstance(part, dict) else part for part in parts]
        parts = [each for part in inner for each in part if isinstance(each, (dict, list))]
        if not parts:
            return
    raise ValueError("a message that is nested too deeply")
