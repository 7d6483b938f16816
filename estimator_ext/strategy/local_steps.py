"""Options of local steps: each rank trains by itself, and the ranks synchronise every N steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable, Union

import tensorflow as tf

import hostopt
from hostopt.options import MAX_COUNT, YEAR_S, shown

SLOTS = (None, "average", "keep", "reset")
COMPRESSIONS = (None, "fp16", "bf16", "int8", "int4")
_Optimizer = tf.compat.v1.train.Optimizer
OuterOptimizer = Union[None, _Optimizer, Callable[[], _Optimizer]]


@dataclass(frozen=True)
class LocalSteps:
    """When ranks synchronise their variables, and how: see `HostOffloadStrategy`."""

    every: int = 1
    secs: float | None = None
    warmup_steps: int = 0
    outer_optimizer: OuterOptimizer = None
    slots: str | None = None
    compression: str | None = None
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        _check_count("sync_every", self.every, 1)
        _check_count("sync_warmup_steps", self.warmup_steps, 0)
        _check_count("sync_fragments", self.fragments, 1)
        _check_count("sync_delay", self.delay, 0)
        if self.secs is not None:
            is_number = isinstance(self.secs, (int, float)) and not isinstance(self.secs, bool)
            if not is_number or not 0 < self.secs <= YEAR_S:
                raise _error("sync_secs", self.secs, f"None or seconds up to {YEAR_S:.0f}")
            if self.every != 1:
                raise _error("sync_secs", self.secs, "None with sync_every")
        outer = self.outer_optimizer
        if not (outer is None or isinstance(outer, _Optimizer) or callable(outer)):
            wanted = "an optimizer of tf.compat.v1.train, or a function that returns one"
            raise _error("outer_optimizer", outer, wanted)
        for name, value, choices in (
            ("sync_slots", self.slots, SLOTS),
            ("sync_compression", self.compression, COMPRESSIONS),
        ):
            if not (value is None or isinstance(value, str)) or value not in choices:
                raise _error(name, value, f"one of {', '.join(map(repr, choices))}")
        self._check_together()

    def _check_together(self) -> None:
        others = (self.warmup_steps, self.slots, self.compression, self.fragments, self.delay)
        if not self.is_used and others != (0, None, None, 1, 0):
            raise hostopt.ConfigError(
                "sync_warmup_steps, sync_slots, sync_compression, sync_fragments and sync_delay "
                "have no effect if ranks reduce gradients in each step. Set sync_every, sync_secs "
                "or outer_optimizer too"
            )
        if self.secs is None and self.every % self.fragments:
            raise _error("sync_fragments", self.fragments, f"a divisor of {self.every} steps")
        most = self.every // self.fragments - 1
        if self.secs is None and self.delay > max(most, 0):
            raise _error("sync_delay", self.delay, f"at most {most}, one step before the next one")
        if self.delay and self.slots not in (None, "keep"):
            raise _error("sync_slots", self.slots, "None or 'keep' with sync_delay")
        if self.fragments > 1 and self.slots == "reset":
            raise _error("sync_slots", self.slots, "'average' or 'keep' with sync_fragments")
        if self.fragments > 1 and isinstance(self.outer_optimizer, _Optimizer):
            wanted = "a function that returns an optimizer, as each fragment needs its own"
            raise _error("outer_optimizer", self.outer_optimizer, wanted)

    @property
    def is_used(self) -> bool:
        """True if ranks train by themselves between synchronisations."""
        return self.every > 1 or self.secs is not None or self.outer_optimizer is not None

    @property
    def slot_rule(self) -> str:
        """Rule for slots: "average", "keep" or "reset"."""
        keeps = self.delay or self.outer_optimizer is not None
        return self.slots or ("keep" if keeps else "average")

    def interval(self, steps: int, step_s: float) -> int:
        """Returns the number of steps until the next fragment is synchronised; step_s may be 0."""
        if steps < self.warmup_steps:
            return 1
        if self.secs is None:
            return self.every // self.fragments
        return max(1, math.floor(self.secs / self.fragments / step_s)) if step_s else 1

    def new_outer_optimizer(self) -> _Optimizer | None:
        """Returns the outer optimizer for the default graph, or None."""
        outer = self.outer_optimizer
        if outer is None or isinstance(outer, _Optimizer):
            return outer
        result = outer()
        if not isinstance(result, _Optimizer):
            wanted = "a function that returns an optimizer of tf.compat.v1.train"
            raise _error("outer_optimizer", outer, wanted)
        return result

    def texts(self) -> dict[str, str]:
        """Returns the options by name, for a comparison of the ranks."""
        outer = None if self.outer_optimizer is None else "an optimizer"
        values = {
            "sync_every": self.every,
            "sync_secs": self.secs,
            "sync_warmup_steps": self.warmup_steps,
            "outer_optimizer": outer,
            "sync_slots": self.slots,
            "sync_compression": self.compression,
            "sync_fragments": self.fragments,
            "sync_delay": self.delay,
        }
        return {name: str(value) for name, value in values.items()}


def _check_count(name: str, value: Any, least: int) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not least <= value <= MAX_COUNT:
        raise _error(name, value, f"a whole number from {least} to {MAX_COUNT}")


def _error(name: str, value: Any, wanted: str) -> hostopt.ConfigError:
    return hostopt.ConfigError(
        f"{name} is {shown(value)}, wanted {wanted}. Correct it, or leave it out"
    )
