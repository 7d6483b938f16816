"""Times the steps of an Estimator, of workers that communicate and of some that do not."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from benchmarks import common

WORKERS = 2
_MEETING_S = 120.0


def make_hook(tf: Any, warm_up_steps: int, steps: int, alone: Path | None = None) -> Any:
    """Make a hook that reports `steps_per_s` once `steps` are done after those that warm up.

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
        """Counts steps."""

        done = 0
        started_s = 0.0

        def after_run(self, run_context: Any, run_values: Any) -> None:
            self.done += 1
            if self.done == warm_up_steps:
                if alone is not None:
                    _wait_for_all(alone)
                self.started_s = time.perf_counter()
            elif self.done == warm_up_steps + steps:
                common.report(steps_per_s=steps / (time.perf_counter() - self.started_s))
            timed = self.done >= warm_up_steps + steps
            if timed and alone is not None and _all_have_come(alone, "end"):
                run_context.request_stop()

    return Rate()


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
    from hostopt import bucket, flight_recorder, inline_reducer, lane, reducer

    for module in (inline_reducer, lane, reducer):
        module.all_finite = lambda values: True  # type: ignore[attr-defined]
    bucket.all_within = lambda values, limit: True  # type: ignore[assignment]
    flight_recorder.FlightRecorder.note = lambda *arguments: None  # type: ignore[method-assign]
