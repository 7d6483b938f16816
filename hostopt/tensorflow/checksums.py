"""Checksums of variables, which the ranks compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from zlib_ng.zlib_ng import crc32

from hostopt.cluster.cluster import Cluster
from hostopt.errors import CollectiveMismatchError

_PART_BYTES = 64 << 20


def has_numbers(variable: tf.Variable) -> bool:
    """Returns False for variables of strings, resources and variants."""
    return variable.dtype.base_dtype not in (tf.string, tf.resource, tf.variant)


def nbytes_of(variable: tf.Variable) -> int:
    """Returns the size of a variable in bytes; 0 if its shape is not known."""
    return int((variable.shape.num_elements() or 0) * variable.dtype.base_dtype.size)


def in_parts(variables: Sequence[tf.Variable]) -> Iterator[list[tf.Variable]]:
    """Divides variables into parts, each to be read or written in one run of a session.

    One run per variable would be slow, as TensorFlow prepares each run. One run for all variables
    would need memory for a copy of the whole model and its slots.
    """
    part: list[tf.Variable] = []
    nbytes = 0
    for variable in variables:
        size = nbytes_of(variable)
        if part and nbytes + size > _PART_BYTES:
            yield part
            part, nbytes = [], 0
        part.append(variable)
        nbytes += size
    if part:
        yield part


def checksum(value: Any) -> int:
    """Returns the CRC-32 of the bits of an array."""
    return crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def checksums(session: tf.compat.v1.Session, variables: Sequence[tf.Variable]) -> Any:
    """Returns the checksums of variables that have numbers, an array of uint32."""
    values = (value for part in in_parts(variables) for value in session.run(part))
    return np.array([checksum(value) for value in values], np.uint32)


def check_same(
    of_ranks: Any,
    variables: Sequence[tf.Variable],
    cluster: Cluster,
    when: str,
    remedy: Callable[[Sequence[str]], str],
    step: int | None = None,
) -> None:
    """Raises CollectiveMismatchError if the checksums of a variable differ between ranks.

    Args:
      of_ranks: the checksums [rank, variable].
      when: begins the error.
      remedy: returns the sentence that ends the error, for the names of variables that differ.
    """
    differs = of_ranks != of_ranks[0]
    if not differs.any():
        return
    names = [v.op.name for v, any_ in zip(variables, differs.any(0)) if any_]
    ranks = [rank for rank, any_ in enumerate(differs.any(1)) if any_]
    more = f" and {len(names) - 1} more differ" if len(names) > 1 else " differs"
    raise CollectiveMismatchError(
        f"{when} variable {names[0]!r}{more} between {cluster.describe(0)} and "
        f"{', '.join(map(cluster.describe, ranks))}, but all ranks should have the same values. "
        f"{remedy(names)}",
        **cluster.attributes(ranks[0]),
        step=step,
    )
