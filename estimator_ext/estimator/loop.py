"""Several steps in one run of a session, as a loop of the graph.

model_fn builds one step. The operations of the step are copied into the body of a
`tf.while_loop`. Resources that keep a state between steps (variables, iterators and tables) stay
outside, and the copies use them. So any step of a model_fn can be repeated, including cached
copies of variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_estimator import EstimatorSpec as StockSpec
from estimator_ext._tf_private import last_steps
from estimator_ext.estimator.progress import read_global_step
from estimator_ext.estimator.run_config import RunConfig
from estimator_ext.graphs.walks import runs_before, walk
from estimator_ext.input.positions import forbid_reads
from estimator_ext.spec import stock_spec

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
    """Turns the step of a spec in the default graph into a loop of steps.

    Args:
      hooks: hooks of `train`, which get the number of steps in each run of the session.

    Returns:
      A stock spec whose train_op runs all steps of a loop, each with another batch, and whose loss
      is the mean over them. Its reporting hooks write the summaries of the last step of a loop.
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
            _check_variable(op)
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


def _check_variable(op: tf.Operation) -> None:
    if op.type in ("Variable", "VariableV2"):
        raise hostopt.ConfigError(
            f"variable {op.name!r} is a reference variable, wanted a resource variable with "
            "iterations_per_loop above 1. Call tf.compat.v1.enable_resource_variables() first"
        )


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
