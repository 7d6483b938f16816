"""Python objects as byte strings, without pickle: data of peers must not run code."""

from __future__ import annotations

import base64
import collections
import io
import json
from typing import Any

import numpy as np

_KINDS = (
    "None, bool, int, float, str, bytes, list, tuple, set, frozenset, dict, OrderedDict and numpy "
    "arrays"
)
_SEQUENCES: dict[str, type] = {each.__name__: each for each in (list, tuple, set, frozenset)}
_MAPPINGS: dict[str, type] = {each.__name__: each for each in (dict, collections.OrderedDict)}


class RefusedError(Exception):
    """An object cannot be encoded, on this rank or on the one that was to send it."""


def encode(obj: Any) -> bytes:
    """Encodes an object that is made of the types in `_KINDS`.

    Their subclasses are refused, as the type would change on its way.

    Returns:
      JSON, in which each value except strings and numbers is a list of its type and its content.
    """
    try:
        return json.dumps(_to_json(obj)).encode()
    except (RecursionError, ValueError) as error:
        raise RefusedError(f"it cannot be encoded: {error}. Send a flatter one") from error


def encode_or_refuse(obj: Any) -> bytes:
    """Encodes an object, or else the reason why it cannot be, which `decode` raises."""
    try:
        return encode(obj)
    except RefusedError as error:
        return json.dumps(["refused", str(error)]).encode()


def decode(data: bytes) -> Any:
    """Returns the object that was encoded, or raises the RefusedError of `encode`."""
    return _from_json(json.loads(data))


def _to_json(obj: Any) -> Any:
    kind = type(obj)
    if obj is None or kind in (bool, int, float, str):
        return obj
    if kind is bytes:
        return ["bytes", base64.b64encode(obj).decode()]
    if kind in _SEQUENCES.values():
        return [kind.__name__, [_to_json(each) for each in obj]]
    if kind in _MAPPINGS.values():
        return [kind.__name__, [[_to_json(key), _to_json(value)] for key, value in obj.items()]]
    is_array = kind in (np.ndarray, np.memmap)
    if (is_array or isinstance(obj, np.generic)) and obj.dtype.kind not in "OV":
        file = io.BytesIO()
        np.save(file, obj, allow_pickle=False)
        return ["array" if is_array else "scalar", base64.b64encode(file.getvalue()).decode()]
    raise RefusedError(
        f"it has a part of type {kind.__name__}, wanted {_KINDS}. Convert it, for example to a "
        "dict"
    )


def _from_json(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "refused":
        raise RefusedError(content)
    if kind == "bytes":
        return base64.b64decode(content)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]([(_from_json(key), _from_json(each)) for key, each in content])
    if kind in ("array", "scalar"):
        array = np.load(io.BytesIO(base64.b64decode(content)), allow_pickle=False)
        return array if kind == "array" else array[()]
    return _SEQUENCES[kind]([_from_json(each) for each in content])
