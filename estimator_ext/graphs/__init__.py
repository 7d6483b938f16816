"""Walks over a graph, kinds of its operations, and fingerprints of their values."""
