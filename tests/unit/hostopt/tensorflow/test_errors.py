"""Errors of hostopt that are errors of TensorFlow, too."""

from __future__ import annotations

import pickle

import pytest
import tensorflow as tf

from hostopt.errors import CollectiveMismatchError, ConfigError, HostOptError, PeerLostError
from hostopt.tensorflow.calls import as_tensorflow_error


@pytest.mark.parametrize(
    ("kind", "of_tensorflow"),
    [
        (CollectiveMismatchError, tf.errors.FailedPreconditionError),
        (ConfigError, tf.errors.InvalidArgumentError),
    ],
)
def test_an_error_of_both_kinds(kind: type[HostOptError], of_tensorflow: type) -> None:
    error = kind("too salty", rank=1, step=3)
    error.resume_from("model.ckpt-7")
    both = as_tensorflow_error(error)
    assert isinstance(both, kind) and isinstance(both, of_tensorflow)
    assert type(both).__name__ == kind.__name__ and both.exit_code == kind.exit_code
    assert (str(both), both.message, both.rank, both.step) == (str(error), "too salty", 1, 3)
    assert both.error_code == of_tensorflow(None, None, "").error_code  # type: ignore[attr-defined]
    assert (both.op, both.node_def) == (None, None)  # type: ignore[attr-defined]
    copy = pickle.loads(pickle.dumps(both))
    assert (type(copy), str(copy), copy.rank) == (kind, str(error), 1)
    assert as_tensorflow_error(both) is both


def test_other_errors_stay_as_they_are() -> None:
    error = PeerLostError("gone")
    assert as_tensorflow_error(error) is error
