"""Values of a graph by how they grow with the number of examples in a batch.

Each value has a degree: it grows with the number n of examples as n ** degree. The loss of one
example has degree 0, the number of examples 1, a sum over the batch 1, and a mean 0. Degrees add
up in a product, and all terms of a sum must have the same one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import tensorflow as tf

_POWERS = {"Square": 2, "Reciprocal": -1, "Inv": -1}

CURE = "Say what it is with `python -m estimator_ext --loss mean` or `--loss sum`"
OF_BOTH = (
    "adds terms that are means over the batch and terms that are sums, of which no reduction over "
    "the ranks makes the loss of one process"
)
CURE_OF_BOTH = "Divide the sums by the number of examples, as tf.shape(labels)[0] returns it"
OF_DIMENSIONS = (
    "is a mean over one dimension of unknown size and a sum over another, either of which may be "
    "that of the examples"
)


class Sum(NamedTuple):
    """A sum over examples.

    Args:
      count: number of elements that are added up; 0 if it is not static.
      constants: absolute values of its factors, except 1; NaN if one is not known.
    """

    count: int = 0
    constants: tuple[float, ...] = ()

    def times(self, number: float) -> Sum:
        """Returns the sum with one more factor."""
        return self if number == 1 else Sum(self.count, (*self.constants, number))


@dataclass(frozen=True)
class Value:
    """The degree of a tensor, and what else is known of it.

    Args:
      degree: power of the number of examples with which it grows; None if not known.
      axis: its dimension of examples; None if there is none.
      sums: the sums over examples that it is made of.
      by: the operation that reduced it over the examples, or that hides how.
      problem: what makes it neither a mean nor a sum, and the remedy; else empty.
      penalties: inputs of additions that do not depend on the data, by operation and index.
      other: "Sum" or "Mean" if it has been reduced so over a dimension that may be that of the
        examples, as its size is not static either; else empty.
    """

    degree: float | None = 0
    axis: int | None = None
    has_data: bool = False
    has_variables: bool = False
    sums: frozenset[Sum] = frozenset()
    by: str = ""
    problem: tuple[str, str] | tuple[()] = ()
    penalties: tuple[tuple[tf.Operation, int], ...] = ()
    other: str = ""


def joined(values: Iterable[Value]) -> Value:
    """Returns the value of a sum, or of a choice, of values."""
    values = list(values)
    data = [each for each in values if each.has_data]
    if not data:
        return Value(has_variables=any(each.has_variables for each in values))
    problems = [each.problem for each in data if each.problem]
    degrees = {each.degree for each in data}
    by = next((each.by for each in data if each.degree != 0), data[0].by)
    if len(degrees) > 1 and degrees != {0, None} and not problems:
        problems.append((f"{OF_BOTH} ({by})", CURE_OF_BOTH))
    axes = [each.axis for each in data if each.axis is not None]
    return Value(
        None if None in degrees else data[0].degree,
        axes[0] if axes else None,
        True,
        any(each.has_variables for each in values),
        frozenset().union(*(each.sums for each in data)),
        by,
        problems[0] if problems else (),
        tuple(dict.fromkeys(each for value in data for each in value.penalties)),
    )


def curved(kind: str, value: Value) -> Value:
    """Returns the value of a power, or of another function, of a scalar."""
    if not value.degree:
        return value
    if kind in _POWERS:
        return replace(value, degree=_POWERS[kind] * value.degree)
    text = f"is a function ({kind}) of a sum over the batch ({value.by})"
    return replace(value, degree=None, problem=value.problem or (text, CURE))
