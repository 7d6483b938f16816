"""A single rank whose optimizer applies gradients itself: correct, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from programs.update_kinds import Own

import estimator_ext
import hostopt

estimator_ext.install()


v1 = tf.compat.v1
RANDOM = np.random.RandomState(0)
X, Y = RANDOM.standard_normal((2, 24, 3))
RATE = 0.05


def model_fn(features: dict[str, tf.Tensor], mode: str, params: dict[str, Any]) -> Any:
    """Builds a model whose slopes and offset have an optimizer each: "stock" or "own"."""
    slopes = v1.get_variable("slopes", initializer=np.ones(3))
    offset = v1.get_variable("offset", initializer=np.ones(3))
    loss = tf.reduce_mean((features["x"] * slopes + offset - features["y"]) ** 2)
    made = {"stock": lambda: v1.train.GradientDescentOptimizer(RATE), "own": lambda: Own(0.9)}
    step, updates = v1.train.get_global_step(), []
    for variable, name in ((slopes, params["slopes"]), (offset, params["offset"])):
        counted = (
            step if variable is offset else v1.get_variable("n", [], tf.int64, trainable=False)
        )
        updates.append(made[name]().minimize(loss, counted, [variable]))
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=tf.group(updates))


def trained(directory: Path, batch: int, params: dict[str, str], **config: Any) -> list[Any]:
    def input_fn() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices({"x": X, "y": Y}).batch(batch)

    config = {"train_distribute": None, **config}
    estimator = estimator_ext.Estimator(
        model_fn, str(directory), estimator_ext.RunConfig(**config), params
    )
    estimator.train(input_fn)
    return [estimator.get_variable_value(name) for name in ("slopes", "offset")]


KINDS = [("stock", "own"), ("own", "stock"), ("own", "own"), ("stock", "stock")]


@pytest.mark.parametrize(("slopes", "offset"), KINDS)
def test_micro_batches_make_one_step(tmp_path: Path, slopes: str, offset: str) -> None:
    params = {"slopes": slopes, "offset": offset}
    result = trained(
        tmp_path / "micro",
        4,
        params,
        train_distribute=estimator_ext.HostOffloadStrategy(),
        accumulate_steps=2,
    )
    expected = trained(tmp_path / "whole", 8, params)
    assert not np.allclose(expected, 1.0)
    np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize(("slopes", "offset"), KINDS)
def test_only_updates_that_can_be_skipped_are_accepted(
    tmp_path: Path, slopes: str, offset: str
) -> None:
    params = {"slopes": slopes, "offset": offset}
    strategy = estimator_ext.HostOffloadStrategy(nonfinite="skip")
    if "own" not in params.values():
        trained(tmp_path, 4, params, train_distribute=strategy)
        return
    name = "slopes" if slopes == "own" else "offset"
    message = r"\(AssignVariableOp\), which updates variable '.*' .* Use nonfinite='error'"
    with pytest.raises(hostopt.ConfigError, match=message) as caught:
        trained(tmp_path, 4, params, train_distribute=strategy)
    if offset != slopes:
        assert repr(name) in str(caught.value)
