"""Measurements: clocks, slow ranks, and the tuning of options by both."""
