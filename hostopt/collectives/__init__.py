"""Collective algorithms over arrays in host memory, and their wire formats."""

from __future__ import annotations
