"""Sums of gradients that are NaN or Inf: errors and warnings that name the ranks to blame.

All ranks see the same sums, so all of them take these decisions alike and in the same order. They
exchange which of their local gradients were not finite, so that every rank reports the same text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.communicator import Communicator, all_gather_json
from hostopt.collectives.finite import all_finite
from hostopt.errors import NonFiniteGradientError

_log = logging.getLogger(__name__)

# Neither an error nor a warning: the caller checks the sums itself, as loss scaling does.
ALLOW = "allow"

_ADVICE = {
    "error": "Look at the data and the loss of what it names, lower the learning rate or clip. "
    "nonfinite='skip' would leave such steps out",
    "skip": "No variable is updated in this step",
    "warn": "The update is made nevertheless",
}


class NonFiniteCheck:
    """Raises or logs, depending on `nonfinite`, if sums of gradients are not finite.

    Args:
      communicator: communicator on which all ranks create their checks in the same order.
      nonfinite: "error", "skip" or "warn" as for `Options`, or `ALLOW`; by default the option.
      is_local: True for gradients of this rank alone, which the other ranks do not check.
    """

    def __init__(
        self, communicator: Communicator, nonfinite: str | None = None, *, is_local: bool = False
    ) -> None:
        self._is_local = is_local
        self._channel = communicator.duplicate("gradients that are not finite")
        self.nonfinite = nonfinite or communicator.transport.options.nonfinite
        self._nonfinite_calls: set[str] = set()

    @property
    def finite(self) -> bool:
        """True if all sums were finite in their last reduction."""
        return not self._nonfinite_calls

    def check(
        self,
        call: CollectiveCall,
        is_finite: bool,
        find_in_local: Callable[[], Mapping[str, str]],
        find_in_sums: Callable[[], Mapping[str, str]],
        wire_format_name: str | None = None,
    ) -> None:
        """Raises or logs unless the sums of a call are finite, which all ranks know alike.

        Collective: all ranks must call it. It communicates only if the sums are not finite. The
        functions call `find_nonfinite`, for the gradients of this rank and for the sums.
        """
        self._nonfinite_calls.discard(call.name)
        if is_finite or self.nonfinite == ALLOW:
            return
        self._nonfinite_calls.add(call.name)
        local, cluster = find_in_local(), self._channel.transport.cluster
        by_rank = {self._channel.rank: local}
        if not self._is_local:
            by_rank = dict(enumerate(all_gather_json(self._channel, local)))
        report = self._report(call, by_rank, find_in_sums(), wire_format_name)
        if self.nonfinite != "error":
            _log.warning("%s", report)
            return
        ranks = [rank for rank, kinds in by_rank.items() if kinds]
        error = NonFiniteGradientError(
            report,
            **(cluster.attributes(ranks[0]) if ranks else {}),
            step=call.step,
            bucket=call.bucket,
        )
        # a rank that has not received all byte strings raises this error as well
        self._channel.abort(error)
        raise error

    def _report(
        self,
        call: CollectiveCall,
        by_rank: Mapping[int, Mapping[str, str]],
        sums: Mapping[str, str],
        wire_format_name: str | None,
    ) -> str:
        """Explains which gradients of which ranks are not finite; the same text on all ranks."""
        describe = self._channel.transport.cluster.describe
        text = "; ".join(
            f"{describe(rank)} has {_listed(kinds)}" for rank, kinds in by_rank.items() if kinds
        )
        if not text:
            wire = f", or their {wire_format_name} form on the wire," if wire_format_name else ""
            text = (
                f"the gradients of every rank are finite, but their sum{wire} has overflowed: "
                f"{_listed(sums)}"
            )
        return (
            f"not finite in step {call.step} (counted from 0), summing {call.name}: {text}. "
            f"{_ADVICE[self.nonfinite]}"
        )


def _listed(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{kind} for {name!r}" for name, kind in kinds.items())


def find_nonfinite(names: Sequence[str], arrays: Sequence[Array]) -> dict[str, str]:
    """Returns "NaN" or "Inf" by name, for each gradient that holds one."""
    return {
        name: "NaN" if np.isnan(array).any() else "Inf"
        for name, array in zip(names, arrays)
        if not all_finite(array)
    }
