"""Type checks of values that were read as JSON.

A shape is a type, None, or a structure of shapes. A tuple describes a list of that length, and a
dict an object, which may have additional keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_MAX_NUMBER = 1 << 64


class Each(NamedTuple):
    """A list of any length whose elements all have a shape."""

    shape: Any


class Or(NamedTuple):
    """Either of two shapes."""

    first: Any
    second: Any


def has_shape(value: Any, shape: Any) -> bool:
    """Returns True if a value that was read as JSON has a shape."""
    if isinstance(shape, Or):
        return has_shape(value, shape.first) or has_shape(value, shape.second)
    if isinstance(shape, Each):
        return isinstance(value, list) and all(has_shape(each, shape.shape) for each in value)
    if isinstance(shape, tuple):
        is_as_long = isinstance(value, list) and len(value) == len(shape)
        return is_as_long and all(map(has_shape, value, shape))
    if isinstance(shape, dict):
        is_object = isinstance(value, dict) and shape.keys() <= value.keys()
        return is_object and all(has_shape(value[key], part) for key, part in shape.items())
    if shape is None or value is None:
        return shape is value
    if shape in (int, float):
        return _is_number(value, shape)
    return isinstance(value, shape)


def _is_number(value: Any, kind: type) -> bool:
    is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    return is_number and bool(-_MAX_NUMBER <= value <= _MAX_NUMBER)  # NaN is not
