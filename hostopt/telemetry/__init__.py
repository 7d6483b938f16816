"""Timelines, trace files and the flight recorder."""

from __future__ import annotations

__all__: list[str] = []
