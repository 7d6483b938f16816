"""train_and_evaluate: each process does what its role in the cluster is."""

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
from estimator_ext._tf_estimator import Estimator, EvalSpec, Evaluator, TrainingExecutor, TrainSpec
from estimator_ext._tf_estimator import train_and_evaluate as stock_train_and_evaluate
from estimator_ext.checkpoints import check, newest
from estimator_ext.evaluators import Evaluators, meet_evaluators, with_evaluators
from estimator_ext.file_errors import errors_of_files, write_whole
from estimator_ext.model_dir_lock import training_in
from estimator_ext.signs_of_life import SignsOfLife
from estimator_ext.strategy import HostOffloadStrategy
from hostopt.options import RING_ENDED

__all__: list[str] = []

_log = tf.get_logger()

_MARKER = "hostopt-training-ended.json"
_POLL_S = 0.5
# A marker that an evaluator finds when it starts may be left from an earlier run, until the chief
# of this run removes it; one that stays this long is meant.
_OLD_MARKER_S = 60.0


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec | Sequence[EvalSpec]
) -> Any:
    """Train on all ranks and evaluate in parallel; same signature as the stock function.

    The chief and the workers train. An evaluator evaluates and exports each new checkpoint, until
    the chief has ended, early or not. Several evaluators divide the data of each checkpoint among
    them, or have an EvalSpec each. Where the cluster lists no evaluator the chief evaluates the
    final checkpoint itself. Without a cluster, one process does everything in turn. Without a
    `HostOffloadStrategy` the stock function does it, or refuses.

    Args:
      estimator: an `estimator_ext.Estimator`.
      train_spec: a `tf.estimator.TrainSpec`.
      eval_spec: a `tf.estimator.EvalSpec`, whose input_fn has an argument input_context where
        there are several evaluators; or a list of them with a name each: evaluator i takes
        number i. Without an evaluator all are evaluated at the end only.

    Returns:
      (metrics, export results) of the last evaluation in the process that evaluated, an evaluator
      among them; (None, []) in the others. Exports are in evaluator 0 of several. A process that
      evaluates a list of EvalSpecs returns two dicts, by name.

    Raises:
      hostopt.ConfigError: the cluster's evaluators do not fit eval_spec.
      hostopt.HostOptError: the ring failed, or an evaluator sees nothing of the chief.
      TypeError: an argument is not of the type that it should be.
    """
    eval_specs = _check_specs(eval_spec)
    TrainingExecutor(estimator, train_spec, eval_specs[0])  # checks them
    strategy = estimator.config.train_distribute
    if not isinstance(strategy, HostOffloadStrategy) or strategy.cluster.task is None:
        is_chief = estimator.config.is_chief
        with training_in(estimator.model_dir) if is_chief else contextlib.nullcontext():
            if len(eval_specs) == 1:
                return stock_train_and_evaluate(estimator, train_spec, eval_specs[0])
            _train(estimator, train_spec)
            return _evaluate_all(estimator, train_spec, eval_specs)
    if strategy.cluster.role == "evaluator":
        return _run_evaluator(strategy.cluster, estimator, train_spec, eval_specs)
    if not strategy.cluster.is_chief:
        _train(estimator, train_spec)
        return None, []
    return _run_chief(strategy, estimator, train_spec, eval_specs)


def _check_specs(eval_spec: EvalSpec | Sequence[EvalSpec]) -> list[EvalSpec]:
    several = isinstance(eval_spec, (list, tuple)) and not isinstance(eval_spec, EvalSpec)
    eval_specs = list(eval_spec) if several else [eval_spec]
    for spec in eval_specs:
        if not isinstance(spec, EvalSpec):
            raise TypeError(
                f"`eval_spec` must have type `tf.estimator.EvalSpec`, or be a list of them. Got: "
                f"{type(spec)}"
            )
    names = [spec.name for spec in eval_specs]
    if not names or (len(names) > 1 and (not all(names) or len(set(names)) < len(names))):
        raise hostopt.ConfigError(
            f"the EvalSpecs are named {names}, wanted one EvalSpec, or several that have a name "
            "each. Give each a name of its own, such as EvalSpec(..., name='night')"
        )
    return eval_specs


def _evaluate_all(
    estimator: Estimator, train_spec: TrainSpec, eval_specs: list[EvalSpec]
) -> tuple[Any, Any]:
    """The final evaluation in a process that evaluates alone."""
    found = {
        spec.name: _Evaluation(estimator, train_spec, spec).run_final() for spec in eval_specs
    }
    if len(eval_specs) == 1:
        return found[eval_specs[0].name]
    return {k: metrics for k, (metrics, _) in found.items()}, {k: e for k, (_, e) in found.items()}


def _run_chief(
    strategy: HostOffloadStrategy,
    estimator: Estimator,
    train_spec: TrainSpec,
    eval_specs: list[EvalSpec],
) -> tuple[Any, Any]:
    """What the chief of a ring does; nobody else trains in its model_dir meanwhile."""
    marker = _Marker(estimator.model_dir)
    with contextlib.ExitStack() as lock:
        try:
            lock.enter_context(training_in(estimator.model_dir))
            marker.remove()
        except hostopt.HostOptError as error:
            strategy.communicator.abort(error)  # meets the other ranks, which wait for this one
            raise
        _train(estimator, train_spec)
        results: tuple[Any, Any] = (None, [])
        if not strategy.cluster.evaluators:
            _log.info("the cluster has no evaluator: the chief evaluates the final checkpoint")
            results = _evaluate_all(estimator, train_spec, eval_specs)
        marker.write(tf.train.latest_checkpoint(estimator.model_dir))
    return results


def _run_evaluator(
    cluster: hostopt.Cluster,
    estimator: Estimator,
    train_spec: TrainSpec,
    eval_specs: list[EvalSpec],
) -> tuple[Any, Any]:
    """What an evaluator does: alone, with an EvalSpec of its own, or with the others."""
    index, count = cluster.task.index, len(cluster.evaluators)
    if len(eval_specs) > 1:
        if index >= len(eval_specs) or count not in (0, len(eval_specs)):
            names = [spec.name for spec in eval_specs]
            raise hostopt.ConfigError(
                f"evaluator {index} of {count or 'an unknown number'} finds the EvalSpecs "
                f"{names}, wanted one for each evaluator. Start {len(names)} evaluators"
            )
        return _evaluate_until_ended(estimator, train_spec, eval_specs[index])
    (eval_spec,) = eval_specs
    if index == 0 and count <= 1:
        return _evaluate_until_ended(estimator, train_spec, eval_spec)
    strategy = estimator.config.train_distribute
    with (
        meet_evaluators(strategy, eval_spec.input_fn) as evaluators,
        with_evaluators(estimator, evaluators) as shared,
    ):
        if index > 0:
            return _evaluate_when_told(shared, estimator.model_dir, eval_spec, evaluators)
        results = _evaluate_until_ended(shared, train_spec, eval_spec, evaluators.say)
        evaluators.say(ended=True)
        return results


def _train(estimator: Estimator, train_spec: TrainSpec) -> None:
    estimator.train(
        train_spec.input_fn,
        hooks=train_spec.hooks,
        max_steps=train_spec.max_steps,
        saving_listeners=train_spec.saving_listeners,
    )


@dataclass(frozen=True)
class _Marker:
    """File that the chief leaves in model_dir when training has ended.

    Args:
      model_dir: directory that chief and evaluators share.
    """

    model_dir: str

    @property
    def _path(self) -> str:
        return os.path.join(self.model_dir, _MARKER)

    def write(self, checkpoint: str | None) -> None:
        """Say that training has ended, `checkpoint` being the last one."""
        note = {"checkpoint": os.path.basename(checkpoint or ""), "time_ns": time.time_ns()}
        with errors_of_files(self.model_dir):
            tf.io.gfile.makedirs(self.model_dir)
        write_whole(self._path, [json.dumps(note).encode()])

    def remove(self) -> None:
        """Say that training goes on."""
        with errors_of_files(self.model_dir):
            if tf.io.gfile.exists(self._path):
                tf.io.gfile.remove(self._path)

    def read(self) -> bytes | None:
        """What the chief wrote when training ended, bytes of that run; None before."""
        with (
            errors_of_files(self.model_dir),
            contextlib.suppress(tf.errors.NotFoundError),
            tf.io.gfile.GFile(self._path, "rb") as file,
        ):
            return bytes(file.read())
        return None


class _Evaluator(Evaluator):
    """The stock one, whose exporters get an Estimator that evaluates alone."""

    def _export_eval_result(self, *arguments: Any) -> Any:
        shared = self._estimator
        self._estimator = copy.copy(shared)
        self._estimator._evaluators = None
        try:
            return super()._export_eval_result(*arguments)
        finally:
            self._estimator = shared


class _Evaluation:
    """Evaluates checkpoints of one estimator, each once, and keeps the last result.

    Args:
      estimator: whose checkpoints.
      train_spec: says which step is the last.
      eval_spec: data, hooks and exporters.
    """

    def __init__(self, estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> None:
        self._estimator = estimator
        self._exports = bool(eval_spec.exporters)
        self._evaluator = _Evaluator(estimator, eval_spec, train_spec.max_steps)
        self._results: tuple[Any, Any] = (None, [])
        self._said = ""  # of a checkpoint that cannot be read

    def run(self) -> tuple[Any, Any]:
        """Evaluate the newest checkpoint, if there is one that was not evaluated yet.

        One that is deleted meanwhile, or damaged, is left out: there may be another.
        """
        path = None
        try:
            path = self._estimator.latest_checkpoint()
            result, exports = self._evaluator.evaluate_and_export()
        except (ValueError, IndexError, tf.errors.OpError, hostopt.CheckpointError):
            if not self._cannot_read(path):
                raise
            return self._results
        if result.metrics:
            self._results = (result.metrics, exports)
        return self._results

    def _cannot_read(self, path: str | None) -> bool:
        """Whether a checkpoint, or the one that is the newest now, is the cause of an error."""
        try:
            for each in (path, newest(self._estimator.model_dir)):
                if each is not None:
                    check(each)
        except hostopt.CheckpointError as damage:
            if str(damage) != self._said:
                text = "%s. It is not evaluated; if training has deleted it, being quicker than "
                _log.warning(text + "this evaluator, raise keep_checkpoint_max", damage)
            self._said = str(damage)
            return True
        return False

    def run_final(self) -> tuple[Any, Any]:
        """Evaluate the last checkpoint; exporters are told that it is the last."""
        if self._cannot_read(None):
            return self._results
        path = self._estimator.latest_checkpoint()
        if path:
            # a run that ended before max_steps has its final export too, also where this
            # checkpoint has been evaluated before anybody knew that it was the last
            self._evaluator._max_training_steps = int(tf.train.load_variable(path, "global_step"))
            if self._exports and not self._evaluator.is_final_export_triggered:
                self._evaluator._previous_ckpt_path = None
        return self.run()


def _evaluate_until_ended(
    estimator: Estimator,
    train_spec: TrainSpec,
    eval_spec: EvalSpec,
    beat: Callable[[], None] = lambda: None,
) -> tuple[Any, Any]:
    """The evaluator's loop: throttled evaluations, then the final one."""
    evaluation = _Evaluation(estimator, train_spec, eval_spec)
    options = estimator.config.train_distribute.options
    watch = _Watch(_Marker(estimator.model_dir), SignsOfLife(estimator.model_dir, options), beat)
    pause_s = eval_spec.start_delay_secs
    while not watch.ends_within(pause_s):
        started_s = time.monotonic()
        evaluation.run()
        pause_s = max(eval_spec.throttle_secs - (time.monotonic() - started_s), _POLL_S)
    _log.info("training has ended: the final evaluation follows")
    return evaluation.run_final()


def _evaluate_when_told(
    estimator: Estimator, model_dir: str, eval_spec: EvalSpec, evaluators: Evaluators
) -> tuple[Any, Any]:
    """The loop of an evaluator that evaluator 0 leads."""
    metrics = None
    while (name := evaluators.hear()) is not None:
        path = os.path.join(model_dir, name)
        try:
            metrics = estimator.evaluate(
                eval_spec.input_fn, eval_spec.steps, eval_spec.hooks, path, eval_spec.name
            )
        except hostopt.CheckpointError as error:
            _log.warning("%s", error)
    return metrics, []


class _Watch:
    """Watches for the end of training.

    Either the chief says so, or `hostopt run` says that all ranks have ended with exit code 0: a
    program may end before it has trained, or without a last word.

    Args:
      marker: what the chief leaves at the end.
      chief: what else is seen of it.
      beat: called at least twice a second meanwhile.
    """

    def __init__(self, marker: _Marker, chief: SignsOfLife, beat: Callable[[], None]) -> None:
        self._marker = marker
        self._chief = chief
        self._beat = beat
        self._old = marker.read()
        self._trusted_from_s = time.monotonic() + _OLD_MARKER_S
        self._ring_ended = os.environ.get(RING_ENDED)

    def ends_within(self, pause_s: float) -> bool:
        """Pause, but no longer than training goes on.

        Args:
          pause_s: how long to pause.

        Returns:
          True once training has ended.

        Raises:
          hostopt.RetryableError: nothing is seen of the chief for too long.
        """
        until_s = time.monotonic() + pause_s
        while not self._ended():
            self._beat()
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            pause_s = min(_POLL_S, left_s)
            time.sleep(pause_s)
            self._chief.waited(pause_s)
        return True

    def _ended(self) -> bool:
        if self._ring_ended and os.path.exists(self._ring_ended):
            return True
        text = self._marker.read()
        if text is None:
            self._old = None  # a marker that comes from now on is of this run
        return text is not None and (text != self._old or time.monotonic() >= self._trusted_from_s)
