"""Errors of this package; the others are hostopt's."""

from __future__ import annotations

import hostopt

__all__: list[str] = []


class MissingNameError(hostopt.ConfigError, AttributeError):
    """A program uses a name that TensorFlow removed and that cannot be given back."""
