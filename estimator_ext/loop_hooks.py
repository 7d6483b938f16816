"""Hooks of a training in loops; the stock ones reckon with one step a run, and come too late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from estimator_ext.run_config import RunConfig

__all__: list[str] = []


def without_reports(config: RunConfig) -> RunConfig:
    """A configuration with which the stock class adds no hooks that report.

    Args:
      config: that of a training in loops.

    Returns:
      A copy.
    """
    return config.replace(save_summary_steps=0, log_step_count_steps=None)


def reports(loss: tf.Tensor, config: RunConfig, scaffold: Any) -> list[Any]:
    """The hooks that report as often as configured, in place of the stock ones.

    Args:
      loss: scalar, the loss of a loop.
      config: that of a training in loops.
      scaffold: that of the training's spec.

    Returns:
      Hooks for summaries, for loss and step in the log, and for steps a second.
    """
    train = tf.compat.v1.train
    directory, iterations = config.model_dir, config.iterations_per_loop
    hooks: list[Any] = []
    if config.save_summary_steps:
        hooks.append(_SummaryHook(iterations, config.save_summary_steps, directory, scaffold))
    if config.log_step_count_steps:
        every_steps = config.log_step_count_steps
        told = {"loss": loss, "step": train.get_global_step()}
        every_loops = max(1, every_steps // iterations)
        hooks.append(train.LoggingTensorHook(told, every_n_iter=every_loops))
        hooks.append(train.StepCounterHook(every_steps, output_dir=directory))
    return hooks


class _SummaryHook(tf.compat.v1.train.SummarySaverHook):
    """Writes summaries of the loops in which they are due."""

    def __init__(self, iterations: int, every_steps: int, directory: str, scaffold: Any) -> None:
        super().__init__(save_steps=every_steps, output_dir=directory, scaffold=scaffold)
        self._iterations = iterations

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Write what was asked for, and note where the next loop ends."""
        super().after_run(run_context, run_values)
        self._next_step = _global_step(run_context) + self._iterations


def _global_step(run_context: Any) -> int:
    return int(run_context.session.run(tf.compat.v1.train.get_global_step()))


class LoopEndHook(tf.compat.v1.train.SessionRunHook):
    """Stops after the loop in which a step is reached, at which a hook wants to stop.

    Args:
      hooks: all others of the training.
      iterations: steps of a loop.
    """

    def __init__(self, hooks: Sequence[Any], iterations: int) -> None:
        self._hooks = [h for h in hooks if isinstance(h, tf.compat.v1.train.StopAtStepHook)]
        for hook in hooks:
            if hasattr(hook, "_set_steps_per_run"):  # as the stock saver has
                hook._set_steps_per_run(iterations)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Compare the step with those at which to stop.

        Args:
          run_context: of this loop.
          run_values: not used.
        """
        del run_values
        if self._hooks:
            step = _global_step(run_context)
            if any(step >= hook._last_step for hook in self._hooks):
                run_context.request_stop()
