"""Collective algorithms over arrays in host memory, and their wire formats."""
