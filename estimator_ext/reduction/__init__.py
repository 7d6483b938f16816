"""Reductions of gradients and other values within a step, and updates that forget them."""
