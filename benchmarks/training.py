"""Times the steps of an Estimator, with or without communication between workers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

_MEETING_S = 120.0


def make_hook(
    tf: Any,
    warm_up_steps: int,
    steps: int,
    alone: Path | None = None,
    workers: int = 2,
    report: Callable[..., Any] = common.report,
) -> Any:
    """Makes a hook that reports `steps_per_s` and `step_ms` once the timed steps are done.

    `steps_per_s` counts all timed steps; `step_ms` is the median time from one call of `after_run`
    to the next, so that a few interrupted steps do not matter.

    Args:
      tf: TensorFlow with tf.estimator.
      warm_up_steps: number of steps that are not timed, 1 or more.
      steps: number of timed steps.
      alone: an empty directory, for workers that do not communicate. Their timing starts together,
        and they run until all have been timed, so that each runs beside the others all the time.
      workers: number of workers that do not communicate.
      report: called with the results.

    Returns:
      A SessionRunHook.
    """

    class Rate(tf.estimator.SessionRunHook):
        """Times steps."""

        def __init__(self) -> None:
            self.done = 0
            self.times_s: list[float] = []  # after the last step of the warm-up and each timed one

        def after_run(self, run_context: Any, run_values: Any) -> None:
            self.done += 1
            if self.done == warm_up_steps and alone is not None:
                _wait_for_all(alone, workers)
            if warm_up_steps <= self.done <= warm_up_steps + steps:
                self.times_s.append(time.perf_counter())
            if self.done == warm_up_steps + steps:
                report(**rates(self.times_s))
            timed = self.done >= warm_up_steps + steps
            if timed and alone is not None and _all_have_come(alone, "end", workers):
                run_context.request_stop()

    return Rate()


def make_config(classes: Any, strategy: Any = None) -> Any:
    """Makes a RunConfig whose steps only train.

    Args:
      classes: `tf.estimator` or `estimator_ext`.
      strategy: strategy of the training, or None.

    Returns:
      A RunConfig without checkpoints, summaries and reports of the speed.
    """
    return classes.RunConfig(
        train_distribute=strategy,
        save_checkpoints_steps=None,
        save_checkpoints_secs=None,
        save_summary_steps=None,
        log_step_count_steps=None,
    )


def rates(times_s: Sequence[float]) -> dict[str, float]:
    """Computes the speed of steps.

    Args:
      times_s: completion time of the step before the first one, and of each step.

    Returns:
      `steps_per_s` over all steps, and `step_ms`, the median time of a step.
    """
    steps_s = [after - before for before, after in zip(times_s, times_s[1:])]
    return {
        "steps_per_s": len(steps_s) / (times_s[-1] - times_s[0]),
        "step_ms": 1e3 * common.median(steps_s),
    }


def _all_have_come(directory: Path, where: str, workers: int) -> bool:
    """Records that this process has reached a point, and returns True if all have."""
    (directory / f"{where}.{os.getpid()}").touch()
    return len(list(directory.glob(f"{where}.*"))) >= workers


def _wait_for_all(directory: Path, workers: int) -> None:
    deadline_s = time.monotonic() + _MEETING_S
    while not _all_have_come(directory, "start", workers):
        if time.monotonic() > deadline_s:
            raise TimeoutError("another process did not start")
        time.sleep(0.001)


def disable_checks() -> None:
    """Disables the checks and the records of each step of hostopt in this process."""
    from hostopt.collectives import shared_memory
    from hostopt.gradients import bucket, fused_exchange, reducer
    from hostopt.telemetry import flight_recorder

    for module in (fused_exchange, shared_memory, reducer):
        module.all_finite = lambda values: True  # type: ignore[attr-defined]
    bucket.all_within = lambda values, limit: True  # type: ignore[assignment]
    flight_recorder.FlightRecorder.record = lambda *arguments: None  # type: ignore[method-assign]
