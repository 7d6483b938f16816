"""Sums of a bucket in memory that the ranks of one host share, and read where they are.

A place for the sums is used again when no rank holds a view of it: each rank offers the places
that it has done with, and all take the first that is offered by all. Where there is none, they
share another. A training needs one, where nothing holds on to its gradients.
"""

from __future__ import annotations

import numpy as np

from hostopt.bucket import Bucket, unused
from hostopt.communicator import Communicator
from hostopt.lane import Source
from hostopt.ring import Array, Operation

__all__: list[str] = []

_MOST_PLACES = 64  # bits of an offer


class SharedSums:
    """Reduces one bucket over the ranks of one host.

    Args:
      communicator: a communicator of ranks on one host, which others use in turn.
      bucket: the bucket, the same on all ranks.
    """

    def __init__(self, communicator: Communicator, bucket: Bucket) -> None:
        self._communicator = communicator
        self._bucket = bucket
        self._places: list[Array] = []
        self._can_share = True

    def reduce(self, source: Source, operation: Operation) -> tuple[Array, bool] | None:
        """Sum over the ranks.

        Args:
          source: this rank's values.
          operation: which call this is.

        Returns:
          The sums, of shape [n], not writeable, and whether they are finite; None, with nothing
          reduced, where no place is free and no memory left.

        Raises:
          HostOptError: a rank failed, left or timed out.
        """
        lane = self._communicator.open_lane(self._bucket.nbytes)
        if lane is None:
            return None
        offered = lane.agree(sum(1 << index for index in unused(self._places)), operation)
        if not offered:
            if not self._share_another():
                return None
            offered = 1 << (len(self._places) - 1)
        place = self._places[(offered & -offered).bit_length() - 1]
        finite = lane.reduce_scatter(place, np.add, operation, source)
        sums = place[:]
        sums.flags.writeable = False
        return sums, finite

    def _share_another(self) -> bool:
        """All ranks share a new place, or find that they cannot, now and later."""
        if self._can_share and len(self._places) < _MOST_PLACES:
            memory = self._communicator.share_memory(self._bucket.nbytes)
            self._can_share = memory is not None
            if memory is not None:
                # all views hold the array of bytes, as `unused` expects
                self._places.append(np.frombuffer(memory, np.uint8).view(self._bucket.dtype))
                return True
        return False
