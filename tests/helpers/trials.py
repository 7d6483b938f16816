"""Measured trials of options."""

from __future__ import annotations

from hostopt.measure.tuning import Trial
from hostopt.options import MIB

SIZES = (MIB // 2, MIB, 2 * MIB)


def trial(communication: str, *seconds: float) -> Trial:
    return Trial(communication, MIB, 2, SIZES[: len(seconds)], seconds)
