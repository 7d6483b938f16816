"""Host calls: a function of the user builds the part of a step that runs on the host.

The numbers are the steps of a gradient in docs/architecture.md.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from estimator_ext._tf_estimator import EstimatorSpec as StockSpec
from estimator_ext._tf_estimator import ModeKeys
from estimator_ext.graphs.global_step import changes
from estimator_ext.spec import EstimatorSpec, EvalMetrics, HostCall, MetricOps, stock_spec
from hostopt.tensorflow.background import HOST_DEVICE


def run_on_host(spec: StockSpec, mode: str, iterations: int) -> StockSpec:
    """Builds the host call and the host metrics of an extended spec.

    A stock spec is returned unchanged.

    Returns:
      A stock spec whose train_op runs the host call and increments global_step, or whose
      eval_metric_ops come from eval_metrics.
    """
    if not isinstance(spec, EstimatorSpec):
        return spec
    if mode == ModeKeys.TRAIN and spec.host_call is not None:
        if iterations > 1:
            raise ValueError(
                "EstimatorSpec has a host_call and RunConfig.iterations_per_loop is "
                f"{iterations}, wanted 1 with a host_call: the host is called once in each run of "
                "the session. Leave iterations_per_loop out, or return "
                "train_op=optimizer.minimize(...) without host_call"
            )
        return stock_spec(spec, train_op=_train_op(spec, spec.host_call))
    if mode == ModeKeys.EVAL and spec.eval_metrics is not None:
        return stock_spec(spec, eval_metric_ops=_eval_metric_ops(spec, spec.eval_metrics))
    return stock_spec(spec)


def _train_op(spec: EstimatorSpec, host_call: HostCall) -> tf.Operation:
    function, tensors = host_call
    # after the loss, so that a step without data runs nothing; without a name scope, which would
    # become part of the variables' names
    with tf.device(HOST_DEVICE), tf.control_dependencies([spec.loss]):
        result = function(*_to_host(tensors))
    if isinstance(result, tf.Variable):  # as assign_add returns
        result = result.op
    if not isinstance(result, (tf.Operation, tf.Tensor)):
        raise ValueError(
            f"the function of host_call must return an Operation or Tensor for the step to run, "
            f"got {result!r}. Return for example optimizer.apply_gradients(...)"
        )
    global_step = tf.compat.v1.train.get_global_step()
    _check_not_incremented(global_step)
    with tf.control_dependencies([spec.train_op, result]):
        return global_step.assign_add(1, read_value=False)


def _eval_metric_ops(spec: EstimatorSpec, eval_metrics: EvalMetrics) -> MetricOps:
    if spec.eval_metric_ops:
        raise ValueError("EstimatorSpec cannot contain both eval_metrics and eval_metric_ops.")
    function, tensors = eval_metrics
    with tf.device(HOST_DEVICE):
        sent = _to_host(tensors)
        return function(**sent) if isinstance(sent, dict) else function(*sent)


def _to_host(tensors: Any) -> Any:
    """2. Sends tensors to the host as soon as they are computed; None stays None."""
    return tf.nest.map_structure(
        lambda each: None if each is None else tf.identity(each), tensors, expand_composites=True
    )


def _check_not_incremented(global_step: tf.Variable) -> None:
    op = next(changes(global_step), None)
    if op is not None:
        raise ValueError(
            "Illegal increment of the `global_step` variable: operation "
            f"{op.name!r} changes it, but with a host_call the Estimator increments it once a "
            "step. Call apply_gradients and minimize without global_step"
        )
