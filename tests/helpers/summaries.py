"""Summaries in files of events."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf


def summaries(directory: Path, tag: str = "") -> list[tuple[int, str, float]]:
    """Returns step, tag and number of all summaries in a directory, or of those with a tag."""
    return [
        (event.step, value.tag, value.simple_value)
        for path in sorted(directory.glob("events.*"))
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
        if tag in ("", value.tag)
    ]
