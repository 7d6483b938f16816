"""Options that the extended RunConfig adds to the stock one."""

from __future__ import annotations

import os
from typing import Any, NamedTuple


class TrainingOptions(NamedTuple):
    """Options of `RunConfig`; by default those of a training with a stock configuration."""

    timeline: str | os.PathLike[str] | None = None
    accumulate_steps: int = 1
    uneven_data: str = "join"
    resume_data: str = "state"
    iterations_per_loop: int = 1
    prefetch_depth: int | None = None
    strict: bool = False
    data_service: str | None = None


def options_of(config: Any) -> TrainingOptions:
    """Returns the options of a configuration, stock or extended."""
    options: TrainingOptions = getattr(config, "_options", TrainingOptions())
    return options
