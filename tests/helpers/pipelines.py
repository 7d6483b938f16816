"""Input pipelines, and their elements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

FILES, LINES = 4, 10


Make = Callable[[Path], Any]


data = tf.data.Dataset


def values_of(pipeline: Any) -> list[Any]:
    return [value for element in pipeline for value in np.ravel(element.numpy()).tolist()]


def write_files(path: Path) -> Path:
    """Writes files of lines and of records to a directory, and returns it."""
    for index in range(FILES):
        lines = [f"{LINES * index + line:02d}" for line in range(LINES)]
        path.joinpath(f"{index}.txt").write_text("".join(f"{line}\n" for line in lines))
        with tf.io.TFRecordWriter(str(path / f"{index}.tfrecord")) as writer:
            for line in lines:
                writer.write(line.encode())
    return path


def slices(values: Any) -> Any:
    return data.from_tensor_slices(values)


def number(text: Any) -> Any:
    return tf.strings.to_number(text, tf.int64)


def texts(path: Path) -> Any:
    return data.list_files(f"{path}/*.txt")


def lines(name: Any) -> Any:
    return tf.data.TextLineDataset(name).map(number)


def ten(x: Any) -> Any:
    return data.range(10 * x, 10 * x + 10)
