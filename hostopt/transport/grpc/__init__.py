"""The gRPC transport."""

from __future__ import annotations
