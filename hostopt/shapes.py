"""What a value that was read as JSON is made of.

A shape is a type, None, or made of shapes: a tuple is a list of as many parts; an object may have
more than is wanted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__: list[str] = []

_MOST_NUMBER = 1 << 64


class Each(NamedTuple):
    """A list of parts that all have a shape."""

    shape: Any


class Or(NamedTuple):
    """One of two shapes."""

    first: Any
    second: Any


def has_shape(value: Any, shape: Any) -> bool:
    """Whether a value that was read as JSON is what it should be.

    Args:
      value: what was read.
      shape: a type, None, or made of such.
    """
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
    return is_number and bool(-_MOST_NUMBER <= value <= _MOST_NUMBER)  # NaN is not
