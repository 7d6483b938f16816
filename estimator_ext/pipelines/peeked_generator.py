"""Generators of `from_generator` whose first elements are compared before they are passed on.

Such a generator is called as often as without the comparison, and passes on the same elements.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from estimator_ext.pipelines.samples import checksum

COUNT, LIMIT_S = 64, 0.25  # elements to compare, and seconds after which fewer are enough

Compare = Callable[[list[int]], None]


class PeekedGenerator:
    """A generator function that gives the checksums of its first elements to a function.

    Args:
      generator: the function that `from_generator` was called with.
    """

    def __init__(self, generator: Callable[..., Any]) -> None:
        self._generator = generator
        self._compare: Compare | None = None
        self._lock = threading.Lock()

    def compare_next(self, compare: Compare) -> None:
        """Sets a function that the next call gives its first checksums.

        Args:
          compare: takes the checksums; it raises an error if they are wrong.
        """
        with self._lock:
            self._compare = compare

    def __call__(self, *arguments: Any) -> Iterator[Any]:
        """Yields the elements."""
        with self._lock:
            compare, self._compare = self._compare, None
        elements = iter(self._generator(*arguments))
        if compare is not None:
            held, checksums = _begin(elements)
            compare(checksums)
            elements = itertools.chain(held, elements)
        yield from elements


def peek(state: Any) -> PeekedGenerator:
    """Replaces the generator of a dataset by one whose first elements can be compared.

    Returns:
      The new generator, or the one of an earlier call.
    """
    if not isinstance(state._generator, PeekedGenerator):
        state._generator = PeekedGenerator(state._generator)
    return state._generator


def _begin(elements: Iterator[Any]) -> tuple[list[Any], list[int]]:
    """Takes the first elements; returns copies, as a generator may use an array again."""
    held, checksums = [], []
    deadline_s = time.monotonic() + LIMIT_S
    for element in itertools.islice(elements, COUNT):
        held.append(tf.nest.map_structure(_copy, element))
        checksums.append(checksum(tf.nest.flatten(element, expand_composites=True)))
        if time.monotonic() > deadline_s:
            break
    return held, checksums


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value
