"""A random seed that all ranks share, so that they shuffle their data alike."""

from __future__ import annotations

import contextlib
import zlib
from contextlib import AbstractContextManager

import tensorflow as tf

import hostopt
from estimator_ext._tf_private import SeedOfRanks, current_seed, seed_hidden, set_eager_seed


class CommonSeed:
    """The seed that TensorFlow uses eagerly, outside of steps, if the program sets none.

    Within steps each rank draws other random numbers, as for a dropout.
    """

    def __init__(self, cluster: hostopt.Cluster) -> None:
        self._seed: int | None = None
        is_one_of_many = cluster.size > 1 and cluster.rank is not None
        if is_one_of_many and tf.executing_eagerly() and current_seed() is None:
            self._set(zlib.crc32(repr(cluster.ring).encode()))

    def renew(self, seed: int) -> None:
        """Gives the next dataset another order, unless the program has set a seed of its own."""
        if self._is_current:
            self._set(seed)

    def hidden(self) -> AbstractContextManager[None]:
        """Returns the scope of a step."""
        return seed_hidden() if self._is_current else contextlib.nullcontext()

    @property
    def _is_current(self) -> bool:
        return self._seed is not None and current_seed() == self._seed

    def _set(self, seed: int) -> None:
        self._seed = seed
        set_eager_seed(SeedOfRanks(seed))
