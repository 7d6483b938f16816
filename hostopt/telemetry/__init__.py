"""Timelines, trace files and the flight recorder."""

from __future__ import annotations
