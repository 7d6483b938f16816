"""Reduction of gradients over the ranks, in buckets while backward runs."""
