"""Hooks of a training in loops; the stock hooks expect one step in each run of the session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from estimator_ext.estimator.run_config import RunConfig


def without_reports(config: RunConfig) -> RunConfig:
    """Returns a configuration with which the stock class adds no reporting hooks."""
    return config.replace(save_summary_steps=0, log_step_count_steps=None)


def reports(loss: tf.Tensor, config: RunConfig, scaffold: Any) -> list[Any]:
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
        """Writes the summaries and computes the last step of the next loop."""
        super().after_run(run_context, run_values)
        self._next_step = _global_step(run_context) + self._iterations


def _global_step(run_context: Any) -> int:
    return int(run_context.session.run(tf.compat.v1.train.get_global_step()))


class LoopEndHook(tf.compat.v1.train.SessionRunHook):
    """Stops after the loop that reaches the last step of a `StopAtStepHook` of the training."""

    def __init__(self, hooks: Sequence[Any], iterations: int) -> None:
        self._hooks = [h for h in hooks if isinstance(h, tf.compat.v1.train.StopAtStepHook)]
        for hook in hooks:
            if hasattr(hook, "_set_steps_per_run"):  # as the stock saver has
                hook._set_steps_per_run(iterations)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Stops if the last step of a hook is reached."""
        del run_values
        if self._hooks:
            step = _global_step(run_context)
            if any(step >= hook._last_step for hook in self._hooks):
                run_context.request_stop()
