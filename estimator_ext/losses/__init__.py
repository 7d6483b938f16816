"""Losses: means or sums over the examples of a batch."""
