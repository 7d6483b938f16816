"""Evaluation of checkpoints during a training and at its end."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_estimator import BestExporter, Estimator, EvalSpec, Evaluator, TrainSpec
from estimator_ext.checkpoints.file_errors import replace_file, translate_io_errors
from estimator_ext.checkpoints.model_dir_lock import is_training
from estimator_ext.checkpoints.reading import check, newest, read_step
from estimator_ext.evaluation.evaluators import Evaluators
from hostopt.options import RING_ENDED

_log = tf.get_logger()

MARKER = "hostopt-training-ended.json"
_POLL_S = 0.5
_EVENTS_OF_EVAL = "eval/*.tfevents.*"  # the default of BestExporter
# An evaluator may find the marker of an earlier run, before the chief of this run removes it. A
# marker that stays this long is of this run.
_OLD_MARKER_S = 60.0
_CHECK_EVERY_S = 5.0


@dataclass(frozen=True)
class EndMarker:
    """File that the chief writes into model_dir when training has ended."""

    model_dir: str

    @property
    def _path(self) -> str:
        return os.path.join(self.model_dir, MARKER)

    def write(self, checkpoint: str | None) -> None:
        """Writes the marker, which names the last checkpoint, at the end of training."""
        note = {"checkpoint": os.path.basename(checkpoint or ""), "time_ns": time.time_ns()}
        with translate_io_errors(self.model_dir):
            tf.io.gfile.makedirs(self.model_dir)
        replace_file(self._path, [json.dumps(note).encode()])

    def remove(self) -> None:
        """Removes the marker at the start of training."""
        with translate_io_errors(self.model_dir):
            if tf.io.gfile.exists(self._path):
                tf.io.gfile.remove(self._path)

    def read(self) -> bytes | None:
        """Returns the content of the marker, which differs between runs; None if there is none."""
        with (
            translate_io_errors(self.model_dir),
            contextlib.suppress(tf.errors.NotFoundError),
            tf.io.gfile.GFile(self._path, "rb") as file,
        ):
            return bytes(file.read())
        return None


def recall_best(estimator: Estimator, eval_spec: EvalSpec) -> None:
    """Gives each BestExporter the best result of earlier processes, if it has exported a model.

    The stock class reads that result too, but exports the first evaluation of a process anyway.
    An exporter without event_file_pattern starts anew.
    """
    for exporter in eval_spec.exporters or ():
        is_best = isinstance(exporter, BestExporter) and exporter._event_file_pattern
        if not is_best or exporter._model_dir == estimator.model_dir:
            continue
        exports = tf.io.gfile.glob(
            os.path.join(estimator.model_dir, "export", exporter.name, "[0-9]*")
        )
        pattern = os.path.join(estimator.model_dir, exporter._event_file_pattern)
        if exporter._event_file_pattern == _EVENTS_OF_EVAL:  # but an EvalSpec may have a name
            pattern = os.path.join(estimator.eval_dir(eval_spec.name), "*.tfevents.*")
        best = _best_result(exporter._compare_fn, tf.io.gfile.glob(pattern))
        if exports and best is not None:
            exporter._model_dir = estimator.model_dir
            exporter._best_eval_result, exporter._has_exported = best, True


def _best_result(
    is_better: Callable[..., bool], event_files: Sequence[str]
) -> dict[str, float] | None:
    best: dict[str, float] | None = None
    for file in event_files:
        with contextlib.suppress(tf.errors.DataLossError):  # the end, if its writer was killed
            for event in tf.compat.v1.train.summary_iterator(file):
                values = (each for each in event.summary.value if each.HasField("simple_value"))
                result = {each.tag: each.simple_value for each in values}
                if "loss" in result and (
                    best is None or is_better(best_eval_result=best, current_eval_result=result)
                ):
                    best = result
    return best


class CheckpointEvaluation(Evaluator):
    """Evaluates each checkpoint once; exporters get an Estimator that evaluates alone."""

    _estimator: Estimator

    def __init__(self, estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> None:
        recall_best(estimator, eval_spec)
        super().__init__(estimator, eval_spec, train_spec.max_steps)
        self._results: tuple[Any, Any] = (None, [])
        self._last_warning = ""

    def run(self) -> tuple[Any, Any]:
        """Evaluates the newest checkpoint once; returns (metrics, exports) of the last evaluation.

        A deleted or damaged checkpoint is skipped, as there may be another one.
        """
        path = None
        try:
            path = self._estimator.latest_checkpoint()
            result, exports = self.evaluate_and_export()
        except (ValueError, IndexError, tf.errors.OpError, hostopt.CheckpointError):
            if not self._warn_of_damage(path):
                raise
            return self._results
        if result.metrics:
            self._results = (result.metrics, exports)
        return self._results

    def _warn_of_damage(self, path: str | None) -> bool:
        """Returns True, and warns, if a checkpoint or the newest one now cannot be read."""
        try:
            for each in (path, newest(self._estimator.model_dir)):
                if each is not None:
                    check(each)
        except hostopt.CheckpointError as damage:
            if str(damage) != self._last_warning:
                text = "%s. It is not evaluated; if training deletes checkpoints faster than this "
                _log.warning(text + "evaluator evaluates them, raise keep_checkpoint_max", damage)
            self._last_warning = str(damage)
            return True
        return False

    def run_final(self) -> tuple[Any, Any]:
        """Evaluates the last checkpoint and runs the final exports; returns what `run` returns."""
        if self._warn_of_damage(None):
            return self._results
        path = self._estimator.latest_checkpoint()
        if path:
            # Also exports at the end of a run that ended before max_steps, and if this checkpoint
            # was evaluated before it was known to be the last one.
            self._max_training_steps = read_step(path)
            if self._eval_spec.exporters and not self.is_final_export_triggered:
                self._previous_ckpt_path = None
        return self.run()

    def _export_eval_result(self, *arguments: Any) -> Any:
        shared = self._estimator
        self._estimator = copy.copy(shared)
        self._estimator._evaluators = None
        try:
            return super()._export_eval_result(*arguments)
        finally:
            self._estimator = shared


def evaluate_final(
    estimator: Estimator, train_spec: TrainSpec, eval_specs: list[EvalSpec]
) -> tuple[Any, Any]:
    """Evaluates the last checkpoint in a process that evaluates alone.

    Returns (metrics, export results); with several EvalSpecs, two dicts by name.
    """
    results = [CheckpointEvaluation(estimator, train_spec, s).run_final() for s in eval_specs]
    if len(eval_specs) == 1:
        return results[0]
    names = [spec.name for spec in eval_specs]
    metrics, exports = zip(*results)
    return dict(zip(names, metrics)), dict(zip(names, exports))


def evaluate_until_end(
    estimator: Estimator,
    train_spec: TrainSpec,
    eval_spec: EvalSpec,
    beat: Callable[[], Any] = lambda: None,
) -> tuple[Any, Any]:
    """Evaluates new checkpoints until training has ended; calls `beat` twice a second between."""
    evaluation = CheckpointEvaluation(estimator, train_spec, eval_spec)
    watch = _EndWatch(estimator, beat)
    pause_s = eval_spec.start_delay_secs
    while not watch.ends_within(pause_s):
        started_s = time.monotonic()
        evaluation.run()
        pause_s = max(eval_spec.throttle_secs - (time.monotonic() - started_s), _POLL_S)
    _log.info("training has ended: the final evaluation follows")
    return evaluation.run_final()


def evaluate_announced(
    estimator: Estimator, model_dir: str, eval_spec: EvalSpec, evaluators: Evaluators
) -> tuple[Any, Any]:
    """Evaluates the checkpoints that evaluator 0 announces."""
    metrics = None
    while (name := evaluators.wait_for_checkpoint()) is not None:
        path = os.path.join(model_dir, name)
        try:
            metrics = estimator.evaluate(
                eval_spec.input_fn, eval_spec.steps, eval_spec.hooks, path, eval_spec.name
            )
        except hostopt.CheckpointError as error:
            _log.warning("%s", error)
    return metrics, []


class _EndWatch:
    """Watches for the end of training.

    The chief writes the marker. In addition, `hostopt run` creates the file RING_ENDED when all
    ranks have exited with code 0: a program may exit before it trains, or without a marker.
    """

    def __init__(self, estimator: Estimator, beat: Callable[[], Any]) -> None:
        options = estimator.config.train_distribute.options
        self._chief = ChiefLiveness(estimator.model_dir, options)
        self._beat = beat
        self._marker = EndMarker(estimator.model_dir)
        self._old = self._marker.read()
        self._trusted_from_s = time.monotonic() + _OLD_MARKER_S
        self._ring_ended = os.environ.get(RING_ENDED, "")

    def ends_within(self, pause_s: float) -> bool:
        """Pauses; returns True as soon as training has ended."""
        until_s = time.monotonic() + pause_s
        while not self._has_ended():
            self._beat()
            remaining_s = until_s - time.monotonic()
            if remaining_s <= 0:
                return False
            pause_s = min(_POLL_S, remaining_s)
            time.sleep(pause_s)
            self._chief.waited(pause_s)
        return True

    def _has_ended(self) -> bool:
        if os.path.exists(self._ring_ended):
            return True
        content = self._marker.read()
        if content is None:
            self._old = None  # a later marker is of this run
            return False
        return content != self._old or time.monotonic() >= self._trusted_from_s


# -- the liveness of the chief ---------------------------------------------------------------


class ChiefLiveness:
    """Watches two signs of life of the chief: its lock of model_dir, and new checkpoints."""

    def __init__(self, model_dir: str, options: hostopt.Options) -> None:
        self._model_dir = model_dir
        self._options = options
        self._saved = self._last_save()
        self._was_seen = is_training(model_dir)
        self._check_every_s = min(_CHECK_EVERY_S, options.stall_warning_s)
        self._reset()

    def _reset(self) -> None:
        self._silent_s = 0.0
        self._check_at_s = self._check_every_s
        self._warning_at_s = self._options.stall_warning_s

    def waited(self, pause_s: float) -> None:
        """Adds a time of waiting, without evaluations, and checks for signs of life if due."""
        self._silent_s += pause_s
        limit_s = self._options.evaluator_timeout_s
        if self._silent_s < min(self._check_at_s, limit_s):
            return
        self._check_at_s = self._silent_s + self._check_every_s
        saved = self._last_save()
        if saved != self._saved or is_training(self._model_dir):
            self._saved, self._was_seen = saved, True
            self._reset()
            return
        text = (
            f"this evaluator has seen nothing of the chief for {self._silent_s:.0f} s: nobody "
            f"trains in {self._model_dir}, and there is no new checkpoint"
        )
        if self._silent_s >= limit_s:
            kind = hostopt.PeerLostError if self._was_seen else hostopt.RendezvousTimeoutError
            raise kind(
                f"{text}. Check the output of the chief and start all processes again; if it "
                "needs longer to start, or between two checkpoints, raise evaluator_timeout_s "
                f"({limit_s:g})"
            )
        if self._silent_s >= self._warning_at_s:
            self._warning_at_s *= 2
            _log.warning("%s. It waits for up to %g s", text, limit_s)

    def _last_save(self) -> int | None:
        """Time of the newest checkpoint in ns; None if there is none."""
        try:
            return int(tf.io.gfile.stat(os.path.join(self._model_dir, "checkpoint")).mtime_nsec)
        except tf.errors.OpError:
            return None
