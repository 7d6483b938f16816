"""Communication report of a step: scalars in the summaries, spans in the timeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext._tf_estimator import EstimatorSpec as StockSpec
from estimator_ext.spec import stock_spec
from hostopt.gradients.reducer import AnyReducer
from hostopt.gradients.step_stats import StepTimes, merge
from hostopt.measure.stragglers import StragglerReports, Stragglers
from hostopt.telemetry.timeline import Timeline, Track
from hostopt.tensorflow.background import HOST_DEVICE


class StepReportHook(tf.compat.v1.train.SessionRunHook):
    """Writes communication times, exposed times and stragglers into rank 0's summaries.

    Each rank sends its times to rank 0, which receives them one step later, so that it does not
    wait for them. Collective: all ranks must have it.

    Args:
      communicator: for this hook alone (a `duplicate`).
      reducers: at least one.
      config: `save_summary_steps` of rank 0 is the number of steps between two reports.
    """

    def __init__(
        self,
        communicator: hostopt.Communicator,
        reducers: Sequence[AnyReducer],
        config: Any,
        model_dir: str | None,
    ) -> None:
        self._communicator = communicator
        self._reducers = reducers
        self._every_steps = config.save_summary_steps or 0
        self._model_dir = model_dir
        self._steps_per_run = getattr(config, "iterations_per_loop", 1)
        self._reports = StragglerReports(communicator)
        self._step = 0
        self._sent: tuple[int, StepTimes] | None = None
        self.stragglers: Stragglers | None = None  # of the last report, on rank 0
        timeline = communicator.transport.timeline
        self.timeline_path = None if timeline is None else timeline.path

    @property
    def totals(self) -> dict[str, Any]:
        """Bytes that this rank has sent, and seconds that each rank has waited, on rank 0."""
        totals: dict[str, Any] = {"sent_bytes": self._communicator.transport.traffic.payload_bytes}
        if self.stragglers is not None:
            totals["waited_s"] = self._reports.waited_s
        return totals

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Broadcasts the first step and the interval of reports from rank 0."""
        del coord
        # later steps are counted by the hook: reading global_step during an update is racy
        local = np.array([session.run(tf.compat.v1.train.get_global_step()), self._every_steps])
        numbers = self._communicator.broadcast(local, name="the interval of step reports")
        self._step, self._every_steps = (int(number) for number in numbers)
        self._communicator.transport.training_step = self._step
        self._reports.begin(self._step)
        for reducer in self._reducers:
            reducer.count_from(self._step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Receives the times of the previous report; sends those of this step if it is due."""
        del run_context, run_values
        self._collect()
        before, every = self._step, self._every_steps
        self._step += self._steps_per_run
        self._communicator.transport.training_step = self._step
        if not every or self._step // every == before // every:
            return
        times = [reducer.last_times for reducer in self._reducers]
        measured = [each for each in times if each is not None]
        if len(measured) < len(times):  # the same on all ranks: nothing has been reduced yet
            return
        self._sent = self._step, merge(measured)
        self._reports.send(*self._sent)

    def end(self, session: tf.compat.v1.Session) -> None:
        """Receives the times of the last report."""
        del session
        self._collect()

    def _collect(self) -> None:
        stragglers = self._reports.collect()
        if stragglers is None or self._sent is None:
            return
        self.stragglers = stragglers
        step, times = self._sent
        scalars = {
            "communication_ms": times.communication_ms,
            "exposed_communication_ms": times.exposed_ms,
            "overlap_percent": times.overlap_percent,
            **stragglers._asdict(),
        }
        write_scalars(self._model_dir, "hostopt", scalars, step)


def write_scalars(
    directory: str | None, group: str, values: Mapping[str, float], step: int
) -> None:
    """Adds a summary of scalars named "group/name" to the events of a directory."""
    summary = tf.compat.v1.Summary()
    for name, value in values.items():
        summary.value.add(tag=f"{group}/{name}", simple_value=value)
    tf.compat.v1.summary.FileWriterCache.get(directory).add_summary(summary, step)


def show_steps(spec: StockSpec, reducers: Sequence[AnyReducer], timeline: Timeline) -> StockSpec:
    """Adds spans of backward and apply to the timeline of each step.

    Backward is measured from the loss to the last launch, apply from the first return of a wait
    to the end of train_op.
    """
    spans = _StepSpans(reducers, timeline)
    with tf.device(HOST_DEVICE), tf.name_scope("timeline"):
        with tf.control_dependencies([spec.loss]):
            begin = _operation(spans.begin, "begin")
        with tf.control_dependencies([spec.train_op, begin]):
            return stock_spec(spec, train_op=_operation(spans.end, "end"))


class _StepSpans:
    def __init__(self, reducers: Sequence[AnyReducer], timeline: Timeline) -> None:
        self._reducers = reducers
        self._timeline = timeline
        self._begin_s = 0.0
        self._shown_step = -1

    def begin(self) -> None:
        self._begin_s = time.monotonic()

    def end(self) -> None:
        end_s = time.monotonic()
        measured = [each.last_times for each in self._reducers if each.last_times]
        if not measured or measured[0].step == self._shown_step:  # nothing was reduced
            return
        times = merge(measured)
        self._shown_step = times.step
        # a launch may precede `begin`, which only waits for the loss
        begin_s = min(self._begin_s, times.last_launch_s)
        step = times.step
        self._timeline.span(Track.BACKWARD, "backward", begin_s, times.last_launch_s, step=step)
        self._timeline.span(Track.APPLY, "apply", times.first_return_s, end_s, step=step)


def _operation(function: Callable[[], None], name: str) -> tf.Operation:
    def call() -> Any:
        function()
        return np.int32(0)

    return tf.numpy_function(call, [], tf.int32, name=name).op
