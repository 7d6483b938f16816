"""The rules of EstimatorSpec, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import tensorflow as tf

import estimator_ext

estimator_ext.install()

MODES = tf.estimator.ModeKeys


def make_estimator(
    model_dir: Path, build: Callable[[tf.Tensor, tf.Variable, str], Any]
) -> estimator_ext.Estimator:
    """Creates an estimator of one weight w, with loss 4 w, whose spec `build` makes."""

    def model_fn(features: tf.Tensor, mode: str) -> Any:
        weight = tf.compat.v1.get_variable("w", [], tf.float32, tf.ones_initializer())
        return build(weight * tf.reduce_sum(features), weight, mode)

    strategy = estimator_ext.HostOffloadStrategy(accelerator="/device:CPU:1")
    config = estimator_ext.RunConfig(
        train_distribute=strategy,
        session_config=tf.compat.v1.ConfigProto(allow_soft_placement=False),
    )
    return estimator_ext.Estimator(model_fn, str(model_dir), config)


def input_fn() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(np.ones(4, np.float32)).repeat(5)


def spec_with(host_call: Any) -> Callable[..., Any]:
    def build(loss: tf.Tensor, weight: tf.Variable, mode: str) -> Any:
        call = host_call(loss, weight) if callable(host_call) else host_call
        return estimator_ext.EstimatorSpec(
            mode, loss=loss, train_op=tf.identity(loss), host_call=call
        )

    return build


@pytest.mark.parametrize(
    ("host_call", "rule"),
    [
        (["f", []], "host_call must be a tuple"),
        ((len,), "host_call must be a tuple .*got a tuple of 1"),
        (("f", []), "first element must be callable"),
        ((len, "xs"), "second element is 'xs'"),
        ((len, (1, 2)), "second element is a tuple of 2"),
        ((len, [3]), "element 0 is 3"),
    ],
)
def test_a_malformed_host_call(tmp_path: Path, host_call: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        make_estimator(tmp_path, spec_with(host_call)).train(input_fn)


def test_a_host_call_that_returns_nothing(tmp_path: Path) -> None:
    estimator = make_estimator(tmp_path, spec_with(lambda loss, w: (lambda x: None, [loss])))
    with pytest.raises(ValueError, match="must return an Operation or Tensor"):
        estimator.train(input_fn)


def test_a_host_call_runs_once_a_step_with_its_arguments_in_order(tmp_path: Path) -> None:
    def host_call(loss: tf.Tensor, weight: tf.Variable) -> Any:
        log = tf.compat.v1.get_variable("log", [2], tf.float32, tf.zeros_initializer())

        def on_host(first: tf.Tensor, second: tf.Tensor) -> tf.Operation:
            assert first.device.endswith("CPU:0")
            return log.assign_add([first, second]).op

        return on_host, [tf.constant(1.0), tf.constant(10.0)]

    estimator = make_estimator(tmp_path, spec_with(host_call))
    estimator.train(input_fn)
    np.testing.assert_array_equal(estimator.get_variable_value("log"), [5.0, 50.0])
    assert estimator.get_variable_value("global_step") == 5


def test_a_host_call_without_arguments(tmp_path: Path) -> None:
    def host_call(loss: tf.Tensor, weight: tf.Variable) -> Any:
        return lambda: weight.assign_add(2.0), []

    estimator = make_estimator(tmp_path, spec_with(host_call))
    estimator.train(input_fn)
    assert estimator.get_variable_value("w") == 11.0


def test_a_model_fn_that_increments_the_global_step_too(tmp_path: Path) -> None:
    def host_call(loss: tf.Tensor, weight: tf.Variable) -> Any:
        step = tf.compat.v1.train.get_global_step()
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        return lambda g: optimizer.apply_gradients([(g, weight)], step), [tf.ones([])]

    estimator = make_estimator(tmp_path, spec_with(host_call))
    with pytest.raises(ValueError, match="Illegal increment of the `global_step` variable"):
        estimator.train(input_fn)


def test_host_call_is_for_training_only(tmp_path: Path) -> None:
    def build(loss: tf.Tensor, weight: tf.Variable, mode: str) -> Any:
        def fail() -> None:
            raise AssertionError("called outside of training")

        return estimator_ext.EstimatorSpec(
            mode,
            loss=loss,
            predictions={"y": tf.fill([4], loss)},
            eval_metric_ops={"mean": tf.compat.v1.metrics.mean(loss)},
            host_call=(fail, []),
        )

    estimator = make_estimator(tmp_path, build)
    assert estimator.evaluate(input_fn)["loss"] == 4.0
    assert len(list(estimator.predict(input_fn))) == 20


@pytest.mark.parametrize("as_dict", [False, True])
def test_eval_metrics_run_over_all_batches(tmp_path: Path, as_dict: bool) -> None:
    def build(loss: tf.Tensor, weight: tf.Variable, mode: str) -> Any:
        def metrics(value: tf.Tensor) -> dict[str, Any]:
            return {"sum": tf.compat.v1.metrics.mean(value * 2)}

        tensors: Any = {"value": loss} if as_dict else [loss]
        return estimator_ext.EstimatorSpec(mode, loss=loss, eval_metrics=(metrics, tensors))

    assert make_estimator(tmp_path, build).evaluate(input_fn)["sum"] == 8.0


def test_both_kinds_of_metrics(tmp_path: Path) -> None:
    def build(loss: tf.Tensor, weight: tf.Variable, mode: str) -> Any:
        mean = tf.compat.v1.metrics.mean(loss)
        return estimator_ext.EstimatorSpec(
            mode, loss=loss, eval_metric_ops={"m": mean}, eval_metrics=(dict, [])
        )

    with pytest.raises(ValueError, match="cannot contain both"):
        make_estimator(tmp_path, build).evaluate(input_fn)


def test_the_spec_is_a_superset_of_the_stock_one() -> None:
    with tf.Graph().as_default():
        loss = tf.constant(1.0)
        call = (lambda: loss, [])
        spec = estimator_ext.EstimatorSpec(MODES.TRAIN, None, loss, loss, host_call=call)
        assert isinstance(spec, tf.estimator.EstimatorSpec)
        assert spec._fields == tf.estimator.EstimatorSpec._fields
        changed = spec._replace(predictions={"a": loss})
        assert changed.predictions == {"a": loss}
        assert changed.host_call is call
        assert spec._replace(host_call=None).host_call is None
        with pytest.raises(ValueError, match="cannot be changed"):
            spec._replace(mode=MODES.EVAL)


def test_subclasses_obey_the_stock_override_rule(tmp_path: Path) -> None:
    class Named(estimator_ext.Estimator):
        def name(self) -> str:
            return "named"

    class Bad(estimator_ext.Estimator):
        def evaluate(self, *args: Any) -> None:
            """The stock class does not allow this either."""

    def model_fn(features: tf.Tensor) -> None:
        """Never called."""

    assert Named(model_fn, str(tmp_path)).name() == "named"
    with pytest.raises(ValueError, match="cannot override members of Estimator"):
        Bad(model_fn, str(tmp_path))
