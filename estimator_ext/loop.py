"""Several steps in one run of a session, as a loop of the graph.

model_fn builds one step, as ever. Its operations are copied into the body of a `tf.while_loop`;
what keeps a state between steps, variables, iterators and tables, stays outside, and the copies
use it. So whatever a model_fn builds can be repeated, variables and their cached copies included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_estimator import EstimatorSpec as StockSpec
from estimator_ext.loop_hooks import LoopEndHook, reports
from estimator_ext.run_config import RunConfig
from estimator_ext.spec import stock_spec

__all__: list[str] = []

_FORBIDDEN = (
    "a hook or a summary_op fetches a tensor of model_fn, which cannot be read in the midst of a "
    "loop. Use a summary, or the loss, or set RunConfig.iterations_per_loop to 1"
)


def check_limits(steps: int | None, max_steps: int | None) -> None:
    """Refuse limits of a training that the stock `train` refuses, in its words.

    Args:
      steps: as given to train.
      max_steps: as given to train.

    Raises:
      ValueError: both are given, or one is below 1.
    """
    if steps is not None and max_steps is not None:
        raise ValueError("Can not provide both steps and max_steps.")
    for name, value in (("steps", steps), ("max_steps", max_steps)):
        if value is not None and value <= 0:
            raise ValueError(f"Must specify {name} > 0, given: {value}")


def check_whole_loops(steps: int | None, iterations: int) -> None:
    """Refuse a number of steps that ends within a loop.

    Args:
      steps: as given to train or evaluate; None for all data.
      iterations: steps of a loop.

    Raises:
      ValueError: steps is no multiple of iterations.
    """
    if steps is not None and steps % iterations:
        raise ValueError(
            f"steps is {steps}, wanted a multiple of iterations_per_loop={iterations}: a loop is "
            f"run as a whole. Give steps={whole_loops(steps, iterations)}, or change "
            "RunConfig.iterations_per_loop"
        )


def whole_loops(max_steps: int, iterations: int) -> int:
    """The number of steps, rounded up to whole loops.

    Args:
      max_steps: as given to train.
      iterations: steps of a loop.

    Returns:
      The smallest multiple of iterations that is no less.
    """
    return -(-max_steps // iterations) * iterations


def in_loop(spec: StockSpec, config: RunConfig, hooks: Sequence[Any]) -> StockSpec:
    """Make the step of a spec a loop of steps.

    Args:
      spec: the training of one step, built in the default graph.
      config: says how many steps a loop has, and how often to report.
      hooks: those of the training besides the spec's; they learn how far a run goes.

    Returns:
      A stock spec whose train_op makes so many steps over as many batches, and whose loss is the
      mean over them. It has the hooks that report, with the summaries of a loop's last step.

    Raises:
      hostopt.ConfigError: a variable cannot be used in a loop.
    """
    iterations = config.iterations_per_loop
    summaries = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.SUMMARIES)
    with tf.control_dependencies([spec.train_op]):
        loss = tf.identity(spec.loss)
    step = _Step([loss, *summaries])

    def body(number: tf.Tensor, total: tf.Tensor, *_: tf.Tensor) -> list[tf.Tensor]:
        loss, *texts = step.copy()
        # the next step begins when this one has ended
        with tf.control_dependencies([loss, *texts]):
            return [number + 1, total + loss, *texts]

    start = [tf.constant(0), tf.zeros([], loss.dtype), *[tf.constant("") for _ in summaries]]
    with tf.device(None), tf.name_scope("iterations_per_loop"):
        _, total, *texts = tf.while_loop(
            lambda number, *_: number < iterations, body, start, parallel_iterations=1
        )
        mean = total / iterations
        summaries[:] = [tf.identity(text) for text in texts]
    step.forbid()
    chief_hooks = [*spec.training_chief_hooks, *reports(mean, config, spec.scaffold)]
    end = LoopEndHook([*hooks, *spec.training_hooks, *chief_hooks], iterations)
    return stock_spec(
        spec,
        loss=mean,
        train_op=mean.op,
        training_hooks=[*spec.training_hooks, end],
        training_chief_hooks=chief_hooks,
    )


class _Step:
    """The operations of a step, which can be copied into the body of a loop.

    Args:
      results: scalars to be computed in each step.
    """

    def __init__(self, results: Sequence[tf.Tensor]) -> None:
        self._results = list(results)
        self._operations: dict[str, tf.Operation] = {}
        self._outside: dict[str, tf.Operation] = {}
        left = [tensor.op for tensor in results]
        while left:
            op = left.pop()
            if op.name in self._operations or op.name in self._outside:
                continue
            _check_variable(op)
            if _stays_outside(op):
                self._outside[op.name] = op
                continue
            self._operations[op.name] = op
            left += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
        self._definition = self._define()

    def _define(self) -> tf.compat.v1.GraphDef:
        whole = self._results[0].graph.as_graph_def()
        part = tf.compat.v1.GraphDef(versions=whole.versions, library=whole.library)
        for node in whole.node:
            if node.name in self._operations:
                part.node.append(node)
                self._cut(part.node[-1])
        return part

    def _cut(self, node: Any) -> None:
        """Leave out what binds a node to those that stay outside, but for its inputs."""
        kept = [name for name in node.input if name[1:] not in self._outside or name[0] != "^"]
        node.input[:] = kept
        beside = node.attr["_class"].list.s
        beside[:] = [at for at in beside if at[len(b"loc:@") :].decode() in self._operations]
        if not beside:
            del node.attr["_class"]

    def copy(self) -> list[tf.Tensor]:
        """The results of a copy of the step, in the default graph."""
        outside = [tensor for op in self._outside.values() for tensor in op.outputs]
        copies = tf.import_graph_def(
            self._definition,
            input_map={tensor.name: tf.identity(tensor) for tensor in outside},
            return_elements=[tensor.name for tensor in self._results],
            name="step",
        )
        return [tf.reshape(copy, []) for copy in copies]  # whose shapes may be unknown

    def forbid(self) -> None:
        """Let the step that was copied fail in words: it would take a batch of its own."""
        with tf.control_dependencies(None):
            never = tf.raw_ops.Assert(condition=False, data=[_FORBIDDEN])
        for op in self._operations.values():
            if op.type.startswith("IteratorGetNext"):
                op._add_control_input(never)


def _stays_outside(op: tf.Operation) -> bool:
    makes_resource = any(tensor.dtype == tf.resource for tensor in op.outputs)
    return (makes_resource and not op.inputs) or op.type in ("Placeholder", "PlaceholderV2")


def _check_variable(op: tf.Operation) -> None:
    if op.type in ("Variable", "VariableV2"):
        raise hostopt.ConfigError(
            f"variable {op.name!r} is a reference variable, wanted a resource variable with "
            "iterations_per_loop above 1. Call tf.compat.v1.enable_resource_variables() first"
        )
