"""Checkpoints and other files in the model directory: read, written, locked."""
