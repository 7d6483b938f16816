"""Ways of training over a slow link, which the benchmarks of local steps compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Way:
    """One way of training.

    Args:
      title: title of its row.
      is_local: True if ranks train by themselves between synchronisations.
      is_outer: True with an outer optimizer, False for the mean of the ranks.
      compression: format of the differences on the wire; None for float32.
      delay: share of the steps between two synchronisations that a rank makes while one of them
        runs in the background; 0 waits for it.
    """

    title: str
    is_local: bool = True
    is_outer: bool = True
    compression: str | None = None
    delay: float = 0.0


WAYS = {
    "every step": Way("a reduction in every step", is_local=False),
    "average": Way("mean of the variables", is_outer=False),
    "diloco": Way("DiLoCo"),
    "bf16": Way("DiLoCo, bf16", compression="bf16"),
    "int8": Way("DiLoCo, int8", compression="int8"),
    "int4": Way("DiLoCo, int4", compression="int4"),
    "background bf16": Way("DiLoCo in the background, bf16", compression="bf16", delay=0.3),
    "background int8": Way("DiLoCo in the background, int8", compression="int8", delay=0.2),
    "background int4": Way("DiLoCo in the background, int4", compression="int4", delay=0.2),
}


def options_of(way: Way, every: int, outer: Callable[[], Any]) -> dict[str, Any]:
    """Returns the options of a strategy.

    Args:
      way: the way of training.
      every: steps between two synchronisations.
      outer: returns the outer optimizer.
    """
    if not way.is_local:
        return {}
    return {
        "sync_every": every,
        "outer_optimizer": outer if way.is_outer else None,
        "sync_compression": way.compression,
        "sync_delay": int(way.delay * every),
    }
