"""Bitwise comparison of two checkpoints."""

from __future__ import annotations

from pathlib import Path


def first_difference(one: Path, other: Path) -> str | None:
    """Compares all variables of two checkpoints bit by bit, including slots.

    Args:
      one: path of a checkpoint.
      other: path of the other one.

    Returns:
      Description of the first variable that differs; None if all are equal.
    """
    import tensorflow as tf

    readers = [tf.train.load_checkpoint(str(path)) for path in (one, other)]
    names = [reader.get_variable_to_shape_map() for reader in readers]
    for name in sorted({*names[0], *names[1]}):
        if not all(name in result for result in names):
            return f"{name} is in one checkpoint only"
        left, right = (reader.get_tensor(name) for reader in readers)
        if left.dtype != right.dtype or left.shape != right.shape:
            return f"{name} is {left.dtype}{left.shape} and {right.dtype}{right.shape}"
        if left.tobytes() != right.tobytes():
            return f"{name} has other values"
    return None
