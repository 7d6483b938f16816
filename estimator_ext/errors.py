"""The error of this package; all others are in `hostopt.errors`."""

from __future__ import annotations

import hostopt


class UnsupportedError(hostopt.ConfigError, AttributeError):
    """A program needs a TPU, or a part of TensorFlow that was removed."""
