"""How the communication of a step went: spans of backward and apply, scalars in the summaries."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Callable, Union

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext._tf_estimator import EstimatorSpec as StockSpec
from estimator_ext.spec import stock_spec
from hostopt.inline_reducer import InlineReducer
from hostopt.reducer import Reducer
from hostopt.skew import SkewReports
from hostopt.step_stats import StepTimes, together
from hostopt.tensorflow.background import HOST_DEVICE
from hostopt.timeline import Timeline, Track

__all__: list[str] = []

AnyReducer = Union[Reducer, InlineReducer]


class StepReportHook(tf.compat.v1.train.SessionRunHook):
    """Writes into rank 0's summaries how much of the communication hides behind backward.

    All ranks must have it. They send their times to rank 0, which collects them one step later,
    when they have long arrived.

    Args:
      communicator: a communicator of its own (a `duplicate`).
      reducers: those of the graph, of one at least.
      every_steps: how often to report, 0 for never; rank 0's holds.
      model_dir: where rank 0 writes.
    """

    def __init__(
        self,
        communicator: hostopt.Communicator,
        reducers: Sequence[AnyReducer],
        every_steps: int,
        model_dir: str | None,
    ) -> None:
        self._communicator = communicator
        self._reducers = reducers
        self._every_steps = every_steps
        self._model_dir = model_dir
        self._reports = SkewReports(communicator)
        self._step = 0
        self._sent: tuple[int, StepTimes] | None = None

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Agree on the step from which all ranks count, and on how often to report.

        Args:
          session: the session of this rank.
          coord: not used.

        Raises:
          hostopt.HostOptError: a rank failed, left or timed out.
        """
        del coord
        # each step counts 1: a global_step that is read while others write it differs by rank
        own = np.array([session.run(tf.compat.v1.train.get_global_step()), self._every_steps])
        agreed = self._communicator.broadcast(own, what="the interval of step reports")
        self._step, self._every_steps = (int(number) for number in agreed)
        self._reports.begin(self._step)
        for reducer in self._reducers:
            reducer.count_from(self._step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Collect what was sent after the previous step; send, where this step is to be reported.

        Args:
          run_context: not used.
          run_values: not used.

        Raises:
          hostopt.HostOptError: a rank failed, left or timed out.
        """
        del run_context, run_values
        self._collect()
        self._step += 1
        if not self._every_steps or self._step % self._every_steps:
            return
        times = [reducer.last_times for reducer in self._reducers]
        measured = [each for each in times if each is not None]
        if len(measured) < len(times):  # on all ranks alike: nothing was reduced so far
            return
        self._sent = self._step, together(measured)
        self._reports.send(*self._sent)

    def end(self, session: tf.compat.v1.Session) -> None:
        """Collect the last report.

        Args:
          session: not used.

        Raises:
          hostopt.HostOptError: a rank failed, left or timed out.
        """
        del session
        self._collect()

    def _collect(self) -> None:
        skew = self._reports.collect()
        if skew is None or self._sent is None:
            return
        step, times = self._sent
        scalars = {
            "communication_ms": times.communication_ms,
            "exposed_communication_ms": times.exposed_ms,
            "overlap_percent": times.overlap_percent,
            **skew._asdict(),
        }
        summary = tf.compat.v1.Summary()
        for name, value in scalars.items():
            summary.value.add(tag=f"hostopt/{name}", simple_value=value)
        writer = tf.compat.v1.summary.FileWriterCache.get(self._model_dir)
        writer.add_summary(summary, step)


def show_steps(spec: StockSpec, reducers: Sequence[AnyReducer], timeline: Timeline) -> StockSpec:
    """Have each step show its backward and apply in a timeline.

    Backward is taken to last from the loss to the last launch, apply from the first return of a
    wait to the end of train_op.

    Args:
      spec: a spec with loss and train_op.
      reducers: those of the graph, of one at least.
      timeline: where the spans go.

    Returns:
      A stock spec, whose train_op also records.
    """
    marks = _Marks(reducers, timeline)
    with tf.device(HOST_DEVICE), tf.name_scope("timeline"):
        with tf.control_dependencies([spec.loss]):
            begun = _operation(marks.begin, "begin")
        with tf.control_dependencies([spec.train_op, begun]):
            return stock_spec(spec, train_op=_operation(marks.end, "end"))


class _Marks:
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
        times = together(measured)
        self._shown_step = times.step
        # a launch may have been quicker than the mark at the loss
        begin_s = min(self._begin_s, times.last_launch_s)
        step = times.step
        self._timeline.span(Track.BACKWARD, "backward", begin_s, times.last_launch_s, step=step)
        self._timeline.span(Track.APPLY, "apply", times.first_return_s, end_s, step=step)


def _operation(mark: Callable[[], None], name: str) -> tf.Operation:
    def call() -> Any:
        mark()
        return np.int32(0)

    return tf.numpy_function(call, [], tf.int32, name=name).op
