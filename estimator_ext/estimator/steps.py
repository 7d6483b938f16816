"""The step that a session runs: with the host call of model_fn, or several in a loop.

model_fn builds one step. For a loop, its operations are copied into the body of a `tf.while_loop`.
Resources that keep a state between steps (variables, iterators and tables) stay outside, and the
copies use them. So any step of a model_fn can be repeated, including cached copies of variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_estimator import EstimatorSpec as StockSpec
from estimator_ext._tf_estimator import ModeKeys
from estimator_ext._tf_private import last_steps
from estimator_ext.estimator.run_config import RunConfig
from estimator_ext.graphs.global_step import changes, read_global_step
from estimator_ext.graphs.walks import runs_before, walk
from estimator_ext.input.positions import forbid_reads
from estimator_ext.spec import EstimatorSpec, EvalMetrics, HostCall, MetricOps, stock_spec
from hostopt.tensorflow.background import HOST_DEVICE

_FORBIDDEN = (
    "a hook or a summary_op fetches a tensor of model_fn, which cannot be read inside a loop. Use "
    "a summary, or the loss, or set RunConfig.iterations_per_loop to 1"
)


def check_limits(steps: int | None, max_steps: int | None) -> None:
    """Checks the limits of a training as the stock `train` does, with the same messages."""
    if steps is not None and max_steps is not None:
        raise ValueError("Can not provide both steps and max_steps.")
    for name, value in (("steps", steps), ("max_steps", max_steps)):
        if value is not None and value <= 0:
            raise ValueError(f"Must specify {name} > 0, given: {value}")


def check_whole_loops(steps: int | None, iterations: int) -> None:
    """Checks that a number of steps is a multiple of the steps of a loop."""
    if steps is not None and steps % iterations:
        raise ValueError(
            f"steps is {steps}, wanted a multiple of iterations_per_loop={iterations}, as loops "
            f"are not interrupted. Give steps={whole_loops(steps, iterations)}, or change "
            "RunConfig.iterations_per_loop"
        )


def whole_loops(max_steps: int, iterations: int) -> int:
    """Rounds a number of steps up to whole loops."""
    return -(-max_steps // iterations) * iterations


def in_loop(spec: StockSpec, config: RunConfig, hooks: Sequence[Any]) -> StockSpec:
    """Turns the step of a spec in the default graph into a loop of steps, each with another batch.

    The loss is the mean over them, and the reporting hooks write the summaries of the last one.
    The hooks of `train` get the number of steps in each run of the session.
    """
    iterations = config.iterations_per_loop
    summaries = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.SUMMARIES)
    with tf.control_dependencies([spec.train_op]):
        loss = tf.identity(spec.loss)
    step = _Step([loss, *summaries])

    def body(number: tf.Tensor, total: tf.Tensor, *_: tf.Tensor) -> list[tf.Tensor]:
        loss, *texts = step.copy()
        # the next step starts after this one
        with tf.control_dependencies([loss, *texts]):
            return [number + 1, total + loss, *texts]

    start = [tf.constant(0), tf.zeros([], loss.dtype), *[tf.constant("") for _ in summaries]]
    with tf.device(None), tf.name_scope("iterations_per_loop"):
        _, total, *texts = tf.while_loop(
            lambda number, *_: number < iterations, body, start, parallel_iterations=1
        )
        mean = total / iterations
        summaries[:] = [tf.identity(text) for text in texts]
    forbid_reads(step.operations.values(), _FORBIDDEN)  # which would consume another batch
    chief_hooks = [*spec.training_chief_hooks, *_reports(mean, config, spec.scaffold)]
    end = _LoopEndHook([*hooks, *spec.training_hooks, *chief_hooks], iterations)
    return stock_spec(
        spec,
        loss=mean,
        train_op=mean.op,
        training_hooks=[*spec.training_hooks, end],
        training_chief_hooks=chief_hooks,
    )


class _Step:
    """The operations of a step, which can be copied into the body of a loop."""

    def __init__(self, results: Sequence[tf.Tensor]) -> None:
        self._results = list(results)
        self.operations: dict[str, tf.Operation] = {}
        self._outside: dict[str, tf.Operation] = {}
        targets = [tensor.op for tensor in results]
        for op in walk(targets, lambda op: [] if _stays_outside(op) else runs_before(op)):
            if op.type in ("Variable", "VariableV2"):
                raise hostopt.ConfigError(
                    f"variable {op.name!r} is a reference variable, wanted a resource variable "
                    "with iterations_per_loop above 1. Call "
                    "tf.compat.v1.enable_resource_variables() first"
                )
            group = self._outside if _stays_outside(op) else self.operations
            group[op.name] = op
        self._definition = self._define()

    def _define(self) -> tf.compat.v1.GraphDef:
        whole = self._results[0].graph.as_graph_def()
        part = tf.compat.v1.GraphDef(versions=whole.versions, library=whole.library)
        for node in whole.node:
            if node.name in self.operations:
                part.node.append(node)
                self._cut(part.node[-1])
        return part

    def _cut(self, node: Any) -> None:
        """Removes control inputs from operations outside the step, and colocation with them."""
        kept = [name for name in node.input if name[1:] not in self._outside or name[0] != "^"]
        node.input[:] = kept
        colocated = node.attr["_class"].list.s
        colocated[:] = [c for c in colocated if c[len(b"loc:@") :].decode() in self.operations]
        if not colocated:
            del node.attr["_class"]

    def copy(self) -> list[tf.Tensor]:
        """Copies the step into the default graph and returns the results of the copy."""
        outside = [tensor for op in self._outside.values() for tensor in op.outputs]
        copies = tf.import_graph_def(
            self._definition,
            input_map={tensor.name: tf.identity(tensor) for tensor in outside},
            return_elements=[tensor.name for tensor in self._results],
            name="step",
        )
        return [tf.reshape(copy, []) for copy in copies]  # their shapes may be unknown


def _stays_outside(op: tf.Operation) -> bool:
    makes_resource = any(tensor.dtype == tf.resource for tensor in op.outputs)
    return (makes_resource and not op.inputs) or op.type in ("Placeholder", "PlaceholderV2")


# -- hooks; the stock ones expect one step in each run of the session ------------------------


def _reports(loss: tf.Tensor, config: RunConfig, scaffold: Any) -> list[Any]:
    """Creates the reporting hooks that replace the stock ones: summaries, log, steps/s."""
    train = tf.compat.v1.train
    directory, iterations = config.model_dir, config.iterations_per_loop
    hooks: list[Any] = []
    if config.save_summary_steps:
        hooks.append(_SummaryHook(iterations, config.save_summary_steps, directory, scaffold))
    if config.log_step_count_steps:
        every_steps = config.log_step_count_steps
        logged = {"loss": loss, "step": train.get_global_step()}
        every_loops = max(1, every_steps // iterations)
        hooks.append(train.LoggingTensorHook(logged, every_n_iter=every_loops))
        hooks.append(train.StepCounterHook(every_steps, output_dir=directory))
    return hooks


class _SummaryHook(tf.compat.v1.train.SummarySaverHook):
    """Writes summaries after the loops in which they are due."""

    def __init__(self, iterations: int, every_steps: int, directory: str, scaffold: Any) -> None:
        super().__init__(save_steps=every_steps, output_dir=directory, scaffold=scaffold)
        self._iterations = iterations

    def after_run(self, run_context: Any, run_values: Any) -> None:
        super().after_run(run_context, run_values)
        self._next_step = read_global_step(run_context.session) + self._iterations


class _LoopEndHook(tf.compat.v1.train.SessionRunHook):
    """Stops after the loop that reaches the last step of a `StopAtStepHook` of the training."""

    def __init__(self, hooks: Sequence[Any], iterations: int) -> None:
        self._hooks = hooks
        for hook in hooks:
            if hasattr(hook, "_set_steps_per_run"):  # as the stock saver has
                hook._set_steps_per_run(iterations)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        ends = last_steps(self._hooks)
        if ends and read_global_step(run_context.session) >= min(ends):
            run_context.request_stop()


# -- host calls: a function of the user builds the part of a step that runs on the host ----------


def run_on_host(spec: StockSpec, mode: str, iterations: int) -> StockSpec:
    """Returns a stock spec with the host call and the host metrics of an extended one.

    Its train_op runs the host call and increments global_step, or its eval_metric_ops come from
    eval_metrics. A stock spec is returned unchanged.
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
    op = next(changes(global_step), None)
    if op is not None:
        raise ValueError(
            "Illegal increment of the `global_step` variable: operation "
            f"{op.name!r} changes it, but with a host_call the Estimator increments it once a "
            "step. Call apply_gradients and minimize without global_step"
        )
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
    """[G2] Sends tensors to the host as soon as they are computed; None stays None."""
    return tf.nest.map_structure(
        lambda each: None if each is None else tf.identity(each), tensors, expand_composites=True
    )
