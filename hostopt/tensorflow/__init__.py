"""Collectives as TensorFlow graph operations."""

from __future__ import annotations

from hostopt.tensorflow.buckets import reduce_in_buckets
from hostopt.tensorflow.ops import all_reduce, broadcast

__all__ = ["all_reduce", "broadcast", "reduce_in_buckets"]
