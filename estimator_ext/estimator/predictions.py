"""Prediction of a limited number of examples."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import tensorflow as tf


def take_predictions(
    predictions: Generator[Any, None, None], number: int, single: bool
) -> Iterator[Any]:
    """Takes the first predictions and ends the session as if the data had ended.

    Args:
      predictions: generator that `tf.estimator.Estimator.predict` returns.
      number: number of examples to predict.
      single: True if each prediction is of one example; False if each is of a batch. The last
        batch is not cut.

    Yields:
      Predictions. The session and its hooks have ended before the last one is yielded.
    """
    seen = 0
    for prediction in predictions:
        seen += 1 if single else _count_examples(prediction)
        if seen >= number:
            _end(predictions)
        yield prediction


def _count_examples(batch: Any) -> int:
    value = next(iter(batch.values())) if isinstance(batch, dict) else batch
    return len(value) if np.ndim(value) else 1


def _end(predictions: Generator[Any, None, None]) -> None:
    """Ends the session by an OutOfRangeError, so that the hooks' `end` is called."""
    try:
        predictions.throw(tf.errors.OutOfRangeError(None, None, "enough predictions"))
    except StopIteration:
        return
