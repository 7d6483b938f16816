"""Times the steps of an Estimator, of workers that communicate and of some that do not."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

WORKERS = 2
_MEETING_S = 120.0


def make_hook(tf: Any, warm_up_steps: int, steps: int, alone: Path | None = None) -> Any:
    """Makes a hook that reports `steps_per_s` and `step_ms` once the timed steps are done.

    `steps_per_s` counts all timed steps; `step_ms` is the median time from one call of `after_run`
    to the next, so that a few steps that something else interrupted do not count.

    Args:
      tf: TensorFlow with tf.estimator.
      warm_up_steps: steps that are not timed, 1 or more.
      steps: steps that are timed.
      alone: an empty directory, for workers that do not communicate. They begin to be timed
        together and go on until all have been timed, so that each has the other one beside it
        all the time.

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
                _wait_for_all(alone)
            if warm_up_steps <= self.done <= warm_up_steps + steps:
                self.times_s.append(time.perf_counter())
            if self.done == warm_up_steps + steps:
                common.report(**rates(self.times_s))
            timed = self.done >= warm_up_steps + steps
            if timed and alone is not None and _all_have_come(alone, "end"):
                run_context.request_stop()

    return Rate()


def make_config(classes: Any, strategy: Any = None) -> Any:
    """Makes a RunConfig that leaves nothing but training in a step.

    Args:
      classes: `tf.estimator` or `estimator_ext`.
      strategy: of the training, or None.

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
    """Speed of the steps between some times.

    Args:
      times_s: when each step was done, after that of the step before the first.

    Returns:
      `steps_per_s` over all steps, and `step_ms`, the median time of a step.
    """
    steps_s = [after - before for before, after in zip(times_s, times_s[1:])]
    return {
        "steps_per_s": len(steps_s) / (times_s[-1] - times_s[0]),
        "step_ms": 1e3 * common.median(steps_s),
    }


def _all_have_come(directory: Path, where: str) -> bool:
    """Note that this process has come to a point, and tell if all have."""
    (directory / f"{where}.{os.getpid()}").touch()
    return len(list(directory.glob(f"{where}.*"))) >= WORKERS


def _wait_for_all(directory: Path) -> None:
    deadline_s = time.monotonic() + _MEETING_S
    while not _all_have_come(directory, "start"):
        if time.monotonic() > deadline_s:
            raise TimeoutError("the other process did not start")
        time.sleep(0.001)


def leave_checks_out() -> None:
    """Take out of hostopt, in this process, what it looks at and notes in each step."""
    from hostopt import bucket, flight_recorder, fused_exchange, inline_reducer, lane, reducer

    for module in (fused_exchange, inline_reducer, lane, reducer):
        module.all_finite = lambda values: True  # type: ignore[attr-defined]
    bucket.all_within = lambda values, limit: True  # type: ignore[assignment]
    flight_recorder.FlightRecorder.note = lambda *arguments: None  # type: ignore[method-assign]
