"""Bulk data on TCP sockets, beside the gRPC connections of the same ranks."""

from __future__ import annotations
