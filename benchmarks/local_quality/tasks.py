"""Two small tasks: handwritten digits, and the next byte of Python's standard library."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import tensorflow as tf

from benchmarks import common

sys.path.insert(0, str(common.ROOT / "examples/mnist"))
import data

# Files of each rank: prose, two groups of packages, and single modules.
_PARTS = (
    ("pydoc_data/*.py",),
    ("asyncio/*.py", "concurrent/**/*.py", "multiprocessing/*.py"),
    ("email/*.py", "http/*.py", "urllib/*.py", "xml/**/*.py"),
    ("[a-c]*.py",),
)
WORKERS = len(_PARTS)
_PART_BYTES = 600_000
_CONTEXT = 16  # bytes that predict the next one
_BYTES = 128  # different ones; those above ASCII count as one
_TEST_BYTES = 16_384  # of each part


@dataclass(frozen=True)
class Examples:
    """Numbered examples.

    Args:
      count: number of examples.
      pick: maps numbers, int64 [n], to features and labels.
    """

    count: int
    pick: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]


@dataclass(frozen=True)
class Task:
    """A data set and a model.

    Args:
      steps: number of steps.
      every: steps between two synchronisations.
      batch: examples of a rank in a step.
      learning_rate: of Adam, at the first step.
      outer: learning rate and momentum of the outer optimizer.
      load: returns the training examples of a rank, and the test examples.
      logits: maps features to logits.
    """

    steps: int
    every: int
    batch: int
    learning_rate: float
    outer: tuple[float, float]
    load: Callable[[int], tuple[Examples, Examples]]
    logits: Callable[[tf.Tensor], tf.Tensor]


# --- digits -------------------------------------------------------------------------------------


def load_digits(rank: int) -> tuple[Examples, Examples]:
    """Every rank has other training images."""
    digits = data.load()
    train = _images(digits.x_train[rank::WORKERS], digits.y_train[rank::WORKERS])
    return train, _images(digits.x_test, digits.y_test)


def _images(images: np.ndarray, labels: np.ndarray) -> Examples:
    def pick(numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        pixels = tf.gather(tf.constant(images), numbers)[..., tf.newaxis]
        return tf.cast(pixels, tf.float32) / 255, tf.gather(tf.constant(labels, tf.int64), numbers)

    return Examples(len(images), pick)


def digits_logits(images: tf.Tensor) -> tf.Tensor:
    layers = tf.keras.layers
    x = layers.MaxPooling2D()(layers.Conv2D(16, 3, activation="relu")(images))
    x = layers.MaxPooling2D()(layers.Conv2D(32, 3, activation="relu")(x))
    x = layers.Dense(64, activation="relu")(layers.Flatten()(x))
    return layers.Dense(data.CLASSES)(x)


# --- bytes --------------------------------------------------------------------------------------


def load_bytes(rank: int) -> tuple[Examples, Examples]:
    """Every rank has other files; the last tenth of all parts is for the test."""
    parts = [_part(patterns) for patterns in _PARTS]
    cuts = [len(part) * 9 // 10 for part in parts]
    tails = [part[cut:] for part, cut in zip(parts, cuts)]
    train = _windows([parts[rank][: cuts[rank]]])
    return train, _windows(tails, _TEST_BYTES)


def _part(patterns: tuple[str, ...]) -> np.ndarray:
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [file for pattern in patterns for file in sorted(library.glob(pattern))]
    text = b"".join(file.read_bytes() for file in files)[:_PART_BYTES]
    return np.minimum(np.frombuffer(text, np.uint8), _BYTES - 1)


def _windows(texts: list[np.ndarray], count: int | None = None) -> Examples:
    """Returns the windows at all positions of each text, or at `count` evenly spaced ones."""
    joined, starts, offset = np.concatenate(texts), [], 0
    for text in texts:
        positions = len(text) - _CONTEXT
        starts.append(offset + np.linspace(0, positions - 1, count or positions).astype(np.int64))
        offset += len(text)
    numbered = np.concatenate(starts)

    def pick(numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        firsts = tf.gather(tf.constant(numbered), numbers)
        places = firsts[:, tf.newaxis] + tf.range(_CONTEXT + 1, dtype=tf.int64)
        windows = tf.cast(tf.gather(tf.constant(joined), places), tf.int64)
        return windows[:, :-1], windows[:, -1]

    return Examples(len(numbered), pick)


def bytes_logits(context: tf.Tensor) -> tf.Tensor:
    layers = tf.keras.layers
    x = layers.Flatten()(layers.Embedding(_BYTES, 16)(context))
    x = layers.Dense(128, activation="relu")(x)
    return layers.Dense(_BYTES)(x)


TASKS = {
    "digits": Task(2000, 50, 32, 2e-3, (1.0, 0.5), load_digits, digits_logits),
    "bytes": Task(3000, 50, 64, 8e-3, (1.0, 0.5), load_bytes, bytes_logits),
}
