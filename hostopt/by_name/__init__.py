"""Collectives that ranks match by name, and ranks that have left with `join()`."""
