"""Options of local steps: each rank trains by itself, and the ranks synchronise every N steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Callable, Union

import tensorflow as tf

import hostopt
from hostopt.options import (
    MAX_COUNT,
    WIRE_FORMATS,
    YEAR_S,
    Choice,
    Number,
    check_option,
    option,
    shown,
)

SLOTS = (None, "average", "keep", "reset")
COMPRESSIONS = (None, *WIRE_FORMATS, "int8", "int4")
_Optimizer: Any = tf.compat.v1.train.Optimizer
OuterOptimizer = Union[None, _Optimizer, Callable[[], _Optimizer]]


@dataclass(frozen=True)
class LocalSteps:
    """When ranks synchronise their variables, and how.

    Args:
      sync_every: number of steps after which the ranks synchronise their variables. With 1 they
        reduce gradients in each step; otherwise each rank trains by itself in between.
      sync_secs: seconds between two synchronisations, instead of `sync_every`.
      sync_warmup_steps: number of first steps of a training after each of which the ranks
        synchronise.
      outer_optimizer: optimizer of `tf.compat.v1.train`, or a function that returns one. It is
        applied at a synchronisation to the variables of the last one, with their difference from
        the mean of the ranks as gradient. None takes the mean.
      sync_slots: what a synchronisation does with the slots of the training's optimizer. "average"
        averages them over the ranks, "keep" does so only for a checkpoint, "reset" initializes
        them. None is "keep" with `outer_optimizer` or `sync_delay`, and "average" otherwise.
      sync_compression: "fp16", "bf16", "int8" or "int4" sends the differences with fewer bits.
      sync_fragments: number of parts of the model that are synchronised one after the other within
        `sync_every` steps.
      sync_delay: number of steps that a rank makes while a synchronisation runs in the background.

    Raises:
      hostopt.ConfigError: a value is not allowed.
    """

    sync_every: int = option(1, Number(1, MAX_COUNT, whole=True))
    sync_secs: float | None = None
    sync_warmup_steps: int = option(0, Number(0, MAX_COUNT, whole=True))
    outer_optimizer: OuterOptimizer = None
    sync_slots: str | None = option(None, Choice(SLOTS))
    sync_compression: str | None = option(None, Choice(COMPRESSIONS))
    sync_fragments: int = option(1, Number(1, MAX_COUNT, whole=True))
    sync_delay: int = option(0, Number(0, MAX_COUNT, whole=True))

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.metadata:
                check_option(each.name, each, getattr(self, each.name))
        is_default = all(getattr(self, each.name) == each.default for each in fields(self))
        if not self.is_used and not is_default:
            raise hostopt.ConfigError(
                "sync_warmup_steps, sync_slots, sync_compression, sync_fragments and sync_delay "
                "have no effect if ranks reduce gradients in each step. Set sync_every, sync_secs "
                "or outer_optimizer too"
            )
        for name, is_wrong, wanted in self._rules():
            if is_wrong:
                raise _error(name, getattr(self, name), wanted)

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yields the name of an option, True if its value is wrong, and the wanted values."""
        secs, outer, slots = self.sync_secs, self.outer_optimizer, self.sync_slots
        is_time = secs is None or (Number(0, YEAR_S).wanted(secs) is None and secs > 0)
        yield "sync_secs", not is_time, f"None or seconds up to {YEAR_S:.0f}"
        yield "sync_secs", secs is not None and self.sync_every != 1, "None with sync_every"
        is_optimizer = isinstance(outer, _Optimizer)
        text = "an optimizer of tf.compat.v1.train, or a function that returns one"
        yield "outer_optimizer", not (outer is None or is_optimizer or callable(outer)), text
        if secs is None:
            steps, rest = divmod(self.sync_every, self.sync_fragments)
            yield "sync_fragments", rest > 0, f"a divisor of {self.sync_every} steps"
            text = f"at most {steps - 1}, one step before the next one"
            yield "sync_delay", self.sync_delay > max(steps - 1, 0), text
        keeps = slots in (None, "keep")
        yield "sync_slots", self.sync_delay > 0 and not keeps, "None or 'keep' with sync_delay"
        if self.sync_fragments > 1:
            yield "sync_slots", slots == "reset", "'average' or 'keep' with sync_fragments"
            text = "a function that returns an optimizer, as each fragment needs its own"
            yield "outer_optimizer", is_optimizer, text

    @property
    def is_used(self) -> bool:
        """True if ranks train by themselves between synchronisations."""
        return (
            self.sync_every > 1 or self.sync_secs is not None or self.outer_optimizer is not None
        )

    @property
    def slot_rule(self) -> str:
        """Rule for slots: "average", "keep" or "reset"."""
        keeps = self.sync_delay or self.outer_optimizer is not None
        return self.sync_slots or ("keep" if keeps else "average")

    def interval(self, steps: int, step_s: float) -> int:
        """Returns the number of steps until the next fragment is synchronised; step_s may be 0."""
        if steps < self.sync_warmup_steps:
            return 1
        if self.sync_secs is None:
            return self.sync_every // self.sync_fragments
        return max(1, math.floor(self.sync_secs / self.sync_fragments / step_s)) if step_s else 1

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
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: str(value) for name, value in {**values, "outer_optimizer": outer}.items()}


def _error(name: str, value: Any, wanted: str) -> hostopt.ConfigError:
    return hostopt.ConfigError(
        f"{name} is {shown(value)}, wanted {wanted}. Correct it, or leave it out"
    )
