"""The launcher behind `hostopt run`: processes, output, signals and restarts."""

from __future__ import annotations
