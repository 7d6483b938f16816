"""The gRPC transport."""

from __future__ import annotations

__all__: list[str] = []
