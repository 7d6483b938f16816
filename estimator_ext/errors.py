"""Errors of this package; the others are hostopt's."""

from __future__ import annotations

import hostopt

__all__: list[str] = []


class UnsupportedError(hostopt.ConfigError, AttributeError):
    """A program needs what TensorFlow removed, or a TPU."""
