"""Reduction of gradients over the ranks, in buckets while backward runs."""

from __future__ import annotations
