"""EstimatorSpec: the stock spec with a host call and with metrics computed on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional, Union

import tensorflow as tf

from estimator_ext._tf_estimator import EstimatorSpec as _StockSpec
from estimator_ext._tf_estimator import ExportOutput

Hooks = Sequence[tf.compat.v1.train.SessionRunHook]
Step = Union[tf.Operation, tf.Tensor, tf.Variable]
# a metric, or its value and the operation that updates it; the first use of tf.keras chooses Keras
MetricOps = dict[str, Union["tf.keras.metrics.Metric", tuple[tf.Tensor, Step]]]
Tensors = Union[list[Optional[tf.Tensor]], dict[str, Optional[tf.Tensor]]]
HostCall = tuple[Callable[..., Step], list[Optional[tf.Tensor]]]
EvalMetrics = tuple[Callable[..., MetricOps], Tensors]


class EstimatorSpec(_StockSpec):
    """Spec that a model_fn returns; extends `tf.estimator.EstimatorSpec` by two fields.

    The arguments are those of the stock spec, and `host_call` and `eval_metrics`.

    Args:
      loss: scalar tensor, the loss divided by the local batch size.
      train_op: operation or tensor of the step on the accelerator, such as `tf.identity(loss)`.
      training_chief_hooks: training hooks of rank 0.
      training_hooks: training hooks of all ranks.
      host_call: tuple (function, list of tensors). In each training step the tensors are sent to
        the host, where the function builds the rest of the step from them: it reduces and applies
        gradients, and returns an operation or tensor.
      eval_metrics: tuple (function, list or dict of tensors). In evaluation the function receives
        the tensors on the host and returns a dict like eval_metric_ops.

    Raises:
      ValueError: a field is invalid.
    """

    host_call: HostCall | None
    eval_metrics: EvalMetrics | None

    def __new__(
        cls,
        mode: str,
        predictions: tf.Tensor | dict[str, tf.Tensor] | None = None,
        loss: tf.Tensor | None = None,
        train_op: Step | None = None,
        eval_metric_ops: MetricOps | None = None,
        export_outputs: dict[str, ExportOutput] | None = None,
        training_chief_hooks: Hooks | None = None,
        training_hooks: Hooks | None = None,
        scaffold: tf.compat.v1.train.Scaffold | None = None,
        evaluation_hooks: Hooks | None = None,
        prediction_hooks: Hooks | None = None,
        host_call: HostCall | None = None,
        eval_metrics: EvalMetrics | None = None,
    ) -> EstimatorSpec:
        _check_call("host_call", host_call, (list,))
        _check_call("eval_metrics", eval_metrics, (list, dict))
        spec: EstimatorSpec = super().__new__(
            cls,
            mode,
            predictions,
            loss,
            train_op,
            eval_metric_ops,
            export_outputs,
            training_chief_hooks,
            training_hooks,
            scaffold,
            evaluation_hooks,
            prediction_hooks,
        )
        spec.host_call = host_call
        spec.eval_metrics = eval_metrics
        return spec

    def _replace(self, **changes: Any) -> EstimatorSpec:
        if changes.get("mode", self.mode) != self.mode:
            raise ValueError("mode of EstimatorSpec cannot be changed.")
        fields = {
            **self._asdict(),
            "host_call": self.host_call,
            "eval_metrics": self.eval_metrics,
            **changes,
        }
        return type(self)(**fields)


def stock_spec(spec: _StockSpec, **changes: Any) -> _StockSpec:
    """Converts a spec, with changes, to a plain `tf.estimator.EstimatorSpec`."""
    return _StockSpec(**{**spec._asdict(), **changes})


def _check_call(name: str, call: Any, containers: tuple[type[Any], ...]) -> None:
    if call is None:
        return
    wanted = f"{name} must be a tuple (function, {' or '.join(c.__name__ for c in containers)})"
    if not isinstance(call, tuple) or len(call) != 2:
        raise ValueError(f"{wanted}, got {_describe(call)}.")
    function, tensors = call
    if not callable(function):
        raise ValueError(f"{wanted}: the first element must be callable, got {function!r}.")
    if not isinstance(tensors, containers):
        raise ValueError(f"{wanted}: the second element is {_describe(tensors)}.")
    values: Sequence[Any] = list(tensors.values() if isinstance(tensors, Mapping) else tensors)
    for index, value in enumerate(values):
        if value is not None and not tf.is_tensor(value):
            raise ValueError(f"{wanted} of tensors: element {index} is {_describe(value)}.")


def _describe(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r} of type {type(value).__name__}"


def operations_of_step(spec: _StockSpec) -> list[tf.Operation]:
    """Returns the operations that run in each step, or in steps with summaries."""
    summaries = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SUMMARIES)
    values = [spec.train_op, spec.loss, *summaries]
    return list(dict.fromkeys(getattr(value, "op", value) for value in values))
