"""The position of a rank in its data, which checkpoints keep."""
