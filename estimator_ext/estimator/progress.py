"""Progress of a training: what `hostopt run` shows, and where the time of a step goes.

The report of the communication in a step goes to the summaries and to the timeline.

Operations of the graph note the times between the parts of a step. They run only in the steps that
fetch them, which are at most ten in a second::

    run begins  input is here  variables are there  last launch  last reduction  update has ended
        |-- input --|---- copy ----|- forward, backward -|-- exposed --|--- update ---|- between --

The copy of the variables begins with the run, so only what is left of it after the input counts.
A single rank launches nothing: its update begins when the last gradient has arrived on the host.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext._tf_estimator import EstimatorSpec as StockSpec
from estimator_ext._tf_private import cached_value_of, control_flow_context, last_steps
from estimator_ext.checkpoints.file_errors import absolute
from estimator_ext.graphs.global_step import read_global_step
from estimator_ext.graphs.walks import runs_before, walk
from estimator_ext.options import options_of
from estimator_ext.reduction.uneven_data import BatchWeights
from estimator_ext.spec import stock_spec
from hostopt.gradients.reducer import AnyReducer
from hostopt.gradients.step_stats import StepTimes, merge
from hostopt.measure.stragglers import StragglerReports, Stragglers
from hostopt.telemetry.progress import is_written, main_metric, write_progress
from hostopt.telemetry.timeline import Timeline, Track
from hostopt.tensorflow._tf_private import call_python
from hostopt.tensorflow.background import HOST_DEVICE

_SAMPLE_S = 0.1  # between two steps whose times are measured
_WRITE_S = 1.0
_RATE_WRITES = 10  # over which the present speed is computed
_SAMPLES, _MIN_SAMPLES = 1000, 5  # the newest ones
# Share of the samples to leave out, the longest ones: whenever hooks fetch another set of tensors
# for the first time, TensorFlow prepares the graph for it.
_OUTLIERS = 0.02
_UPDATES = ("ResourceApply", "ResourceSparseApply")

_first_steps: dict[str, int] = {}  # of this process, by model_dir
_best: dict[tuple[str | None, str], tuple[float, int]] = {}  # by names of evaluation and metric


class Parts(NamedTuple):
    """Times of the parts of a step, in ms. The summary shows them by field name."""

    input: float
    copy_to_accelerator: float
    forward_and_backward: float
    exposed_communication: float
    update: float
    between_steps: float


class StepTimestamps:
    """Operations that note times in a step, and the number of its examples.

    All ranks must create them, as their graphs must be the same.
    """

    def __init__(self, spec: StockSpec, weights: BatchWeights | None) -> None:
        step = walk([getattr(each, "op", each) for each in (spec.train_op, spec.loss)])
        # an operation outside of a branch or loop cannot wait for one inside
        outer = {op: None for op in step if control_flow_context(op) is None}
        inputs = [op for op in outer if op.type.startswith("IteratorGetNext")]
        batches = [each for op in inputs for each in op.outputs if each.shape.rank]
        cached = [cached_value_of(variable) for variable in tf.compat.v1.trainable_variables()]
        with tf.device(HOST_DEVICE), tf.name_scope("progress"):
            self.examples = tf.shape(batches[-1])[0] if batches else tf.constant(0)
            self.times = {
                # a rank waits for the weights of batches until all have their input
                "input_s": _time_after([weights.mean_weight] if weights else inputs),
                "copies_s": _time_after([v for v in cached if v is not None and v.op in outer]),
                "gradients_s": _time_after(_gradients(outer) or [spec.loss]),
                "end_s": _time_after([spec.loss, spec.train_op]),
            }


def _time_after(waited: Sequence[Any]) -> tf.Tensor:
    with tf.control_dependencies(waited):
        return tf.timestamp()


def _gradients(step: Collection[tf.Operation]) -> list[tf.Tensor]:
    """Returns what the updates of a step receive on the host, but for results of other updates."""
    received: dict[str, tf.Tensor] = {}
    after: set[tf.Operation] = set()  # updates, and what depends on one
    for op in step:  # in topological order
        is_update = op.type.startswith(_UPDATES)
        for tensor in op.inputs if is_update else ():
            if tensor.dtype.is_floating and tensor.op not in after:
                received[tensor.name] = tensor
        if is_update or not after.isdisjoint(runs_before(op)):
            after.add(op)
    return [tf.identity(each) for each in received.values()]


class _SaveTimes(tf.compat.v1.train.CheckpointSaverListener):
    """Measures how long checkpoints take, and notes the last one."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self.last_step: int | None = None
        self.last_s: float | None = None  # in Unix time
        self._begin_s = 0.0

    def before_save(self, session: Any, global_step_value: int) -> None:
        self._begin_s = time.monotonic()

    def after_save(self, session: Any, global_step_value: int) -> None:
        self.total_s += time.monotonic() - self._begin_s
        self.last_step, self.last_s = int(global_step_value), time.time()


@dataclass(eq=False)
class ProgressHook(tf.compat.v1.train.SessionRunHook):
    """Measures some steps of the chief, and writes the progress once a second."""

    fetches: dict[str, tf.Tensor]  # loss, examples and times of a step; any may be missing
    report: StepReportHook | None
    batches: int  # of all ranks, in a run of the session
    hooks: Sequence[Any]  # one of them may know the last step
    model_dir: str
    summary_steps: int  # between two summaries; 0 for none

    def __post_init__(self) -> None:
        self.saves = _SaveTimes()
        self._first_step = self._summary_step = self._runs = 0
        self._begin_s = self._run_begin_s = self._next_sample_s = self._next_write_s = 0.0
        self._to_wall_s = 0.0  # from the monotonic clock to that of the operations
        # parts, communication_ms, end_s, and the time of saves before
        self._unfinished: tuple[Parts, float, float, float] | None = None
        self._is_sampled = False
        self._loss: float | None = None
        self._samples: deque[tuple[Parts, float]] = deque(maxlen=_SAMPLES)
        self._examples: deque[int] = deque(maxlen=_SAMPLES)
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=_RATE_WRITES)

    @property
    def is_needed(self) -> bool:
        """True if anyone reads what this hook measures: the launcher, or the summaries."""
        return bool(self.summary_steps) or is_written()

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Reads the first step."""
        self._first_step = self._summary_step = read_global_step(session)

    def before_run(self, run_context: Any) -> Any:
        """Fetches the times of this step if they are due."""
        now_s = time.monotonic()
        self._finish_sample(now_s)
        if not self._runs:
            self._begin_s = now_s
        self._is_sampled = now_s >= self._next_sample_s
        if not self._is_sampled:
            return None
        self._next_sample_s = now_s + _SAMPLE_S
        self._run_begin_s, self._to_wall_s = now_s, time.time() - now_s
        return tf.compat.v1.train.SessionRunArgs(self.fetches)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Counts the step, and writes the progress if it is due."""
        self._runs += 1
        if not self._is_sampled:
            return
        values = run_values.results
        if "loss" in values:
            self._loss = float(values["loss"])
        if "examples" in values:
            self._examples.append(int(values["examples"]))
        if "end_s" in values:
            self._begin_sample(values)
        now_s = time.monotonic()
        if now_s >= self._next_write_s:
            self._next_write_s = now_s + _WRITE_S
            self._write(run_context.session)

    def end(self, session: tf.compat.v1.Session) -> None:
        """Writes the progress at the end of training."""
        if self._runs:
            self._finish_sample(time.monotonic())
            self._write(session, is_ended=True)

    def _begin_sample(self, values: Mapping[str, float]) -> None:
        input_s, copies_s, gradients_s, end_s = (
            values[name] - self._to_wall_s
            for name in ("input_s", "copies_s", "gradients_s", "end_s")
        )
        times = _last_times(self.report.reducers, self._run_begin_s) if self.report else None
        computed_s = times.last_launch_s if times else gradients_s
        exposed_ms = times.exposed_ms if times else 0.0
        begin_s = max(input_s, copies_s)
        parts = Parts(
            1e3 * (input_s - self._run_begin_s),
            1e3 * (begin_s - input_s),
            max(1e3 * (computed_s - begin_s), 0.0),
            exposed_ms,
            max(1e3 * (end_s - computed_s) - exposed_ms, 0.0),
            0.0,
        )
        communication_ms = times.communication_ms if times else 0.0
        self._unfinished = parts, communication_ms, end_s, self.saves.total_s

    def _finish_sample(self, now_s: float) -> None:
        """Adds the time between the sampled step and the next one, without saves."""
        if self._unfinished is None:
            return
        parts, communication_ms, end_s, saves_s = self._unfinished
        self._unfinished = None
        between_ms = 1e3 * max(now_s - end_s - (self.saves.total_s - saves_s), 0.0)
        self._samples.append((parts._replace(between_steps=between_ms), communication_ms))

    def _write(self, session: Any, is_ended: bool = False) -> None:
        step, now_s = read_global_step(session), time.monotonic()
        self._recent.append((now_s, self._runs, step))
        since_s, runs, first = self._recent[0]
        examples = statistics.fmean(self._examples or [0]) * self.batches
        elapsed_s = max(now_s - self._begin_s, 1e-9)
        values: dict[str, Any] = {
            "first_step": _first_steps.setdefault(self.model_dir, self._first_step),
            "resumed_step": self._first_step,
            "step": step,
            "last_step": min(last_steps(self.hooks), default=None),
            "mean_steps_per_s": (step - self._first_step) / elapsed_s,
            "mean_examples_per_s": examples * self._runs / elapsed_s,
            "is_ended": is_ended,
            "model_dir": absolute(self.model_dir),
            **self._measured(),
        }
        if now_s > since_s:
            values["steps_per_s"] = (step - first) / (now_s - since_s)
            values["examples_per_s"] = examples * (self._runs - runs) / (now_s - since_s)
        if self._loss is not None:
            values["loss"] = self._loss
        if self.report is not None:
            values.update(self.report.totals)
        if self.saves.last_step is not None:
            values["checkpoint_step"] = self.saves.last_step
            values["checkpoint_time_s"] = self.saves.last_s
        write_progress("training", values)
        every = self.summary_steps
        if every and step // every != self._summary_step // every:
            self._summary_step = step
            write_scalars(self.model_dir, "step_ms", values.get("times_ms", {}), step)

    def _measured(self) -> dict[str, Any]:
        samples = sorted(self._samples, key=lambda sample: sum(sample[0]))
        if len(samples) < _MIN_SAMPLES:
            return {}
        samples = samples[: -1 - math.ceil(_OUTLIERS * len(samples))]
        parts, communication_ms = zip(*samples)
        times_ms = Parts(*map(statistics.fmean, zip(*parts)))._asdict()
        values: dict[str, Any] = {
            "times_ms": {**times_ms, "save": 1e3 * self.saves.total_s / self._runs}
        }
        total_ms = statistics.fmean(communication_ms)
        if total_ms:
            values["communication_ms"] = total_ms
            values["hidden_percent"] = 100 * (1 - times_ms["exposed_communication"] / total_ms)
        return values


def write_evaluation(metrics: dict[str, Any], name: str | None) -> dict[str, Any]:
    """Writes the progress of an evaluation; returns the metrics."""
    numbers = (bool, int, float, np.bool_, np.integer, np.floating)
    scalars = {key: float(each) for key, each in metrics.items() if isinstance(each, numbers)}
    step = int(scalars.pop("global_step", 0))
    metric, value, sign = main_metric(scalars)
    best, at = _best.get((name, metric), (math.nan, step))
    if math.isnan(best) or sign * value > sign * best:
        best, at = value, step
    _best[name, metric] = best, at
    shown = {"step": step, "metric": metric, "value": value, "best": best, "best_step": at}
    write_progress("evaluation", shown)
    return metrics


def _last_times(reducers: Sequence[AnyReducer], since_s: float = 0.0) -> StepTimes | None:
    """Returns the times of the last communication; None if a reducer has none since a time."""
    times = [each.stats.last for each in reducers]
    measured = [each for each in times if each and each.last_launch_s >= since_s]
    return merge(measured) if measured and len(measured) == len(times) else None


# -- the communication of a step --------------------------------------------------------------


@dataclass(eq=False)
class StepReportHook(tf.compat.v1.train.SessionRunHook):
    """Writes communication times, exposed times and stragglers into rank 0's summaries.

    Each rank sends its times to rank 0, which receives them one step later, so that it does not
    wait for them. Collective: all ranks must have it.
    """

    communicator: hostopt.Communicator  # for this hook alone (a `duplicate`)
    reducers: Sequence[AnyReducer]
    config: Any  # rank 0 reports every `save_summary_steps`
    model_dir: str | None

    def __post_init__(self) -> None:
        self._every_steps = self.config.save_summary_steps or 0
        self._steps_per_run = options_of(self.config).iterations_per_loop
        self._reports = StragglerReports(self.communicator)
        self._step = 0
        self._sent: tuple[int, StepTimes] | None = None
        self._stragglers: Stragglers | None = None  # of the last report, on rank 0
        self._timeline = self.communicator.transport.timeline

    @property
    def totals(self) -> dict[str, Any]:
        """Bytes that this rank has sent; on rank 0 also the seconds that each rank has waited."""
        totals: dict[str, Any] = {"sent_bytes": self.communicator.transport.traffic.payload_bytes}
        if self._timeline is not None:
            totals["timeline"] = str(self._timeline.path.absolute())
        if self._stragglers is not None:
            totals["waited_s"] = self._reports.waited_s
            totals["slowest_rank"] = self._stragglers.slowest_rank
        return totals

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Broadcasts the first step and the interval of reports from rank 0."""
        # later steps are counted by the hook: reading global_step during an update is racy
        local = np.array([read_global_step(session), self._every_steps])
        numbers = self.communicator.broadcast(local, name="the interval of step reports")
        self._step, self._every_steps = (int(number) for number in numbers)
        self.communicator.transport.training_step = self._step
        self._reports.begin(self._step)
        for reducer in self.reducers:
            reducer.count_from(self._step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Receives the times of the previous report; sends those of this step if it is due."""
        self._collect()
        before, every = self._step, self._every_steps
        self._step += self._steps_per_run
        self.communicator.transport.training_step = self._step
        if not every or self._step // every == before // every:
            return
        times = _last_times(self.reducers)
        if times is not None:  # the same on all ranks: None if nothing has been reduced yet
            self._sent = self._step, times
            self._reports.send(*self._sent)

    def end(self, session: tf.compat.v1.Session) -> None:
        """Receives the times of the last report."""
        self._collect()

    def _collect(self) -> None:
        stragglers = self._reports.collect()
        if stragglers is None or self._sent is None:
            return
        self._stragglers = stragglers
        step, times = self._sent
        scalars = {
            "communication_ms": times.communication_ms,
            "exposed_communication_ms": times.exposed_ms,
            "overlap_percent": times.overlap_percent,
            **stragglers._asdict(),
        }
        write_scalars(self.model_dir, "hostopt", scalars, step)


def write_scalars(
    directory: str | None, group: str, values: Mapping[str, float], step: int
) -> None:
    """Adds a summary of scalars named "group/name" to the events of a directory."""
    summary = tf.compat.v1.Summary()
    for name, value in values.items():
        summary.value.add(tag=f"{group}/{name}", simple_value=value)
    tf.compat.v1.summary.FileWriterCache.get(directory).add_summary(summary, step)


def show_steps(
    spec: StockSpec, stamps: StepTimestamps, reducers: Sequence[AnyReducer], timeline: Timeline
) -> StockSpec:
    """Adds spans of copy, backward and apply to the timeline of each step.

    The copy of the variables to the accelerator is measured from the input on, backward from the
    loss to the last launch, apply from the first return of a wait to the end of train_op.
    """
    shown_step, span = -1, timeline.span

    def show(*since_epoch_s: float) -> None:
        nonlocal shown_step
        end_s, to_wall_s = time.monotonic(), time.time() - time.monotonic()
        input_s, copies_s, loss_s = (each_s - to_wall_s for each_s in since_epoch_s)
        measured = [each.stats.last for each in reducers if each.stats.last]
        if not measured or measured[0].step == shown_step:  # nothing was reduced
            return
        times = merge(measured)
        shown_step = step = times.step
        begin_s = min(loss_s, times.last_launch_s)  # a launch may precede the loss
        copied_s = max(copies_s, input_s)  # copies that were renewed are there before
        span(Track.COPY, "copy", input_s, copied_s, step=step)
        span(Track.BACKWARD, "backward", begin_s, times.last_launch_s, step=step)
        span(Track.APPLY, "apply", times.first_return_s, end_s, step=step)

    with tf.device(HOST_DEVICE), tf.name_scope("timeline"):
        times = [stamps.times["input_s"], stamps.times["copies_s"], _time_after([spec.loss])]
        with tf.control_dependencies([spec.train_op]):
            end = call_python(show, times, [], "end")
    return stock_spec(spec, train_op=end)
