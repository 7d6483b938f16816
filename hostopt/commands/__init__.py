"""The commands of `hostopt`, one module each."""

from __future__ import annotations
