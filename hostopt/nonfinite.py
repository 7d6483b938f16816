"""What follows where a sum of gradients is not finite, alike on all ranks.

All ranks see the same sums, so all of them come here for the same ones, in the same order. Here
they tell each other whose own gradients were not finite.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping

from hostopt.communicator import Communicator
from hostopt.errors import NonFiniteGradientError
from hostopt.finite import explain
from hostopt.ring import Operation

__all__: list[str] = []

_log = logging.getLogger(__name__)

# For who looks at the sums himself, as loss scaling does.
ALLOW = "allow"

_WHAT_TO_DO = {
    "error": "Look at the data and the loss of what it names, lower the learning rate or clip. "
    "nonfinite='skip' would leave such steps out",
    "skip": "No variable is updated in this step",
    "warn": "The update is made nevertheless",
}


class NonFiniteCheck:
    """Raises, or warns and remembers, where sums are not finite.

    Args:
      communicator: all ranks open their checks on it in the same order.
      nonfinite: what follows: as the option, which is the default, or `ALLOW`.
    """

    def __init__(self, communicator: Communicator, nonfinite: str | None = None) -> None:
        self._channel = communicator.duplicate("gradients that are not finite")
        self.nonfinite = nonfinite or communicator.transport.options.nonfinite
        self._broken: set[str] = set()

    @property
    def finite(self) -> bool:
        """Whether all sums were finite when they were made last."""
        return not self._broken

    def look(
        self,
        operation: Operation,
        finite: bool,
        own: Callable[[], Mapping[str, str]],
        sums: Callable[[], Mapping[str, str]],
        travels_as: str | None = None,
    ) -> None:
        """Take note of sums; where they are not finite all ranks meet here.

        Args:
          operation: which call has made them.
          finite: whether they are finite, the same on all ranks.
          own: says which of this rank's gradients are not, as `troubles` does.
          sums: says which of the sums are not.
          travels_as: the wire format, where they may have overflowed in it.

        Raises:
          NonFiniteGradientError: they are not, and that is an error.
          HostOptError: a rank failed, left or timed out.
        """
        self._broken.discard(operation.what)
        if finite or self.nonfinite == ALLOW:
            return
        self._broken.add(operation.what)
        texts = self._channel.all_gather_bytes(json.dumps(own()).encode())
        found = [json.loads(text) for text in texts]
        ring = self._channel.transport.cluster.ring
        text = explain(
            operation.what,
            operation.step,
            {f"rank {rank} ({ring[rank]})": names for rank, names in enumerate(found)},
            sums(),
            travels_as,
        )
        text = f"{text}. {_WHAT_TO_DO[self.nonfinite]}"
        if self.nonfinite != "error":
            _log.warning("%s", text)
            return
        rank = next((rank for rank, names in enumerate(found) if names), None)
        error = NonFiniteGradientError(
            text,
            rank=rank,
            task=None if rank is None else ring[rank].name,
            address=None if rank is None else ring[rank].address,
            step=operation.step,
            bucket=operation.bucket,
        )
        self._channel.abort(error)  # a rank that has not heard of all gradients raises it as well
        raise error
