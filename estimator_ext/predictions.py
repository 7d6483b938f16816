"""A given number of predictions, after which prediction ends as with the end of the data."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

__all__: list[str] = []


def first(predictions: Generator[Any, None, None], number: int, single: bool) -> Iterator[Any]:
    """The first of some predictions.

    Args:
      predictions: what `tf.estimator.Estimator.predict` returns.
      number: how many examples to predict.
      single: whether each prediction is of one example; else of a batch, and the last batch is
        not cut.

    Yields:
      Predictions. The session has ended, its hooks too, before the last one comes.
    """
    seen = 0
    for prediction in predictions:
        seen += 1 if single else _examples(prediction)
        if seen >= number:
            _end(predictions)
        yield prediction


def _examples(batch: Any) -> int:
    value = next(iter(batch.values())) if isinstance(batch, dict) else batch
    return len(value) if np.ndim(value) else 1


def _end(predictions: Generator[Any, None, None]) -> None:
    """Let the session take this for the end of its data, so that hooks end as they should."""
    try:
        predictions.throw(tf.errors.OutOfRangeError(None, None, "enough predictions"))
    except StopIteration:
        return
