"""Several evaluators: each evaluates a slice of the data of every checkpoint.

An evaluation, in which all evaluators make the same calls::

    [E1] evaluator 0 announces a checkpoint, or nothing, or the end
    [E2] each restores the checkpoint, and all confirm it: it may be deleted by now, or damaged
    [E3] each evaluates its slice
    [E4] the metric variables are summed, and evaluator 0 writes the results

While there is no new checkpoint, evaluator 0 announces nothing twice a second as a sign of life.
In an evaluation the others wait for the slowest evaluator, and for the exports of evaluator 0.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext._tf_private import is_reference
from estimator_ext.checkpoints.file_errors import io_error
from estimator_ext.checkpoints.reading import is_intact
from estimator_ext.graphs.operation_kinds import READS
from estimator_ext.graphs.walks import data_before, walk
from estimator_ext.variables.sync_on_read import assign
from hostopt.collectives.communicator import all_gather_json
from hostopt.collectives.reduce_op import DTYPES
from hostopt.connect import connect_ring

# Minimum of collective_timeout_s between evaluators, as one may need much longer than another. A
# dead process is detected at once.
_MIN_TIMEOUT_S = 3600.0


class Evaluators:
    """The evaluators of a cluster, as seen by one of them."""

    def __init__(self, communicator: hostopt.Communicator) -> None:
        self.communicator = communicator
        self.index = communicator.rank  # evaluator 0 leads and writes
        self._unconfirmed = ""  # checkpoint that not all have confirmed to be restored

    @property
    def input_context(self) -> tf.distribute.InputContext:
        """Slice of the data of this evaluator; batches are as large as with one evaluator."""
        return tf.distribute.InputContext(self.communicator.size, self.index, 1)

    def local_steps(self, steps: int | None) -> int | None:
        """Returns this evaluator's share of the steps of all evaluators; None is for all data."""
        size = self.communicator.size
        if steps is None:
            return None
        if steps < size:
            raise hostopt.ConfigError(
                f"EvalSpec.steps is {steps} for {size} evaluators, which share the steps. Give at "
                f"least {size}, or start fewer evaluators"
            )
        return steps // size + (self.index < steps % size)

    def wait_for_checkpoint(self) -> str | None:
        """[E1] Waits, except on evaluator 0, for the next checkpoint's name; None at the end."""
        message: dict[str, Any] = {}
        while not message:
            message = self.announce()
        return message.get("checkpoint")

    def announce(self, **message: Any) -> dict[str, Any]:
        """[E1] Announces checkpoint=NAME, ended=True or nothing; returns evaluator 0's message."""
        return dict(all_gather_json(self.communicator, message, "the next evaluation")[0])

    @contextlib.contextmanager
    def evaluation(self, checkpoint: str, model_dir: str) -> Iterator[None]:
        """Scope of one evaluation, which evaluator 0 announces.

        There may be another one after a CheckpointError only.
        """
        if self.index == 0:
            self.announce(checkpoint=os.path.basename(checkpoint))
        self._unconfirmed = checkpoint
        try:
            yield
        except hostopt.HostOptError:
            raise
        except BaseException as error:
            may_be_damage = isinstance(error, (ValueError, IndexError, tf.errors.OpError))
            if self._unconfirmed and may_be_damage and not is_intact(checkpoint):
                self.confirm_restored(False)
            translated = io_error(error, model_dir)
            self.communicator.abort(translated or error)
            if translated is not None:
                raise translated from error
            raise

    def confirm_restored(self, success: bool = True) -> None:
        """[E2] Raises an error on all evaluators unless all have restored. Collective."""
        checkpoint, self._unconfirmed = self._unconfirmed, ""
        answers = self.communicator.all_gather_bytes(
            b"1" if success else b"", f"who has restored {os.path.basename(checkpoint)}"
        )
        ring = self.communicator.transport.cluster.ring
        failed = [task.name for task, answer in zip(ring, answers) if not answer]
        if failed:
            raise hostopt.CheckpointError(
                f"{', '.join(failed)} could not read {checkpoint}. Give all evaluators the "
                "chief's model_dir; if training deletes checkpoints too early, raise "
                "keep_checkpoint_max"
            )


@contextlib.contextmanager
def connect_evaluators(strategy: Any, input_fn: Callable[..., Any]) -> Iterator[Evaluators]:
    """Connects the evaluators; an error in the block ends all of them."""
    ring = strategy.cluster.evaluator_ring()
    if "input_context" not in inspect.signature(input_fn).parameters:
        raise hostopt.ConfigError(
            "the input_fn of EvalSpec has no argument input_context, so each example would be "
            f"counted {ring.size} times. Let it take input_context and return "
            "dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id), "
            "or give train_and_evaluate one EvalSpec for each evaluator"
        )
    communication = strategy.options.communication
    options = dataclasses.replace(
        strategy.options,
        communication="auto" if communication == "mpi" else communication,
        debug_dir=None,  # the ranks that train write there
        collective_timeout_s=max(strategy.options.collective_timeout_s, _MIN_TIMEOUT_S),
        timeline=None,
    )
    with connect_ring(ring, options) as communicator:
        yield Evaluators(communicator)


@contextlib.contextmanager
def with_evaluators(estimator: Any, evaluators: Evaluators) -> Iterator[Any]:
    """Creates a copy of an Estimator to evaluate with others; only evaluator 0 keeps model_dir."""
    shared = copy.copy(estimator)
    shared._evaluators = evaluators
    with tempfile.TemporaryDirectory() as scratch:
        if evaluators.index > 0:
            shared._model_dir = scratch
        yield shared


# -- the sums of metrics ---------------------------------------------------------------------

_ADD = re.compile(r"AssignAdd(VariableOp)?|(Resource)?Scatter(Nd)?Add")
_PYTHON = {"EagerPyFunc", "PyFunc"}


class SumMetricsHook(tf.compat.v1.train.SessionRunHook):
    """Sums the variables of the metrics over the evaluators, before results are read.

    It must come before all other hooks, so that they read the results of all data at the end.
    Collective: all evaluators must have it.
    """

    def __init__(self, evaluators: Evaluators, values: dict[str, Any]) -> None:
        self._evaluators = evaluators
        self._variables = find_summable(values)
        self._initial_values: list[Any] = []

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """[E2] Checks that all evaluators restored the checkpoint and have the same metrics."""
        self._evaluators.confirm_restored()
        descriptions = {v.op.name: f"{v.shape} {v.dtype.base_dtype.name}" for v in self._variables}
        self._evaluators.communicator.check_same(descriptions, "the variables of metrics")
        self._initial_values = [session.run(variable) for variable in self._variables]

    def end(self, session: tf.compat.v1.Session) -> None:
        """[E4] Sums the increments of all evaluators."""
        for variable, initial in zip(self._variables, self._initial_values):
            increment = np.asarray(session.run(variable) - initial)
            name = f"metric variable {variable.op.name!r}"
            total = initial + self._evaluators.communicator.all_reduce(increment, name=name)
            assign(session, [variable], [total])


def find_summable(values: dict[str, Any]) -> list[tf.Variable]:
    """Finds the variables whose sums over slices of the data give the results for all data.

    They are local variables that change by additions only. The added values depend on no such
    variable. The values are results by metric; the variables are sorted by name.
    """
    local = {variable.op.name: variable for variable in tf.compat.v1.local_variables()}
    changed = {name for name, variable in local.items() if any(_changes(variable))}
    summable = set()
    for metric, value in sorted(values.items()):
        sources = _sources([value.op])
        of_metric = changed & set(sources)
        for name in of_metric:
            _check(metric, local[name], changed)
        if any(op.type.startswith("IteratorGetNext") for op in sources.values()):
            raise _not_summable(metric, "its result is computed from the last batch")
        called = sorted({op.type for op in sources.values()} & _PYTHON)
        if called and not of_metric:
            raise _not_summable(metric, f"{called[0]} keeps its own state")
        summable |= of_metric
    return [local[name] for name in sorted(summable)]


def _changes(variable: tf.Variable) -> Iterator[tf.Operation]:
    """Operations that change a variable, without its initializer."""
    (handle,) = variable.op.outputs
    for op in handle.consumers():
        # an operation that changes a reference variable returns the reference
        reads = is_reference(handle) and not any(map(is_reference, op.outputs))
        if not reads and op.type not in READS and op.name != variable.initializer.name:
            yield op


def _check(metric: str, variable: tf.Variable, changed: set[str]) -> None:
    dtype, text = variable.dtype.base_dtype.name, f"its variable {variable.op.name!r}"
    if dtype not in DTYPES:
        raise _not_summable(metric, f"{text} is of dtype {dtype}")
    for op in _changes(variable):
        if not _ADD.fullmatch(op.type):
            raise _not_summable(metric, f"{text} changes by {op.type} ({op.name})")
        if changed & set(_sources(tensor.op for tensor in op.inputs[1:])):
            raise _not_summable(metric, f"{text} grows by the values of variables ({op.name})")


def _sources(operations: Iterable[tf.Operation]) -> dict[str, tf.Operation]:
    return {op.name: op for op in walk(operations, data_before)}


def _not_summable(metric: str, reason: str) -> hostopt.ConfigError:
    return hostopt.ConfigError(
        f"metric {metric!r} cannot be summed over several evaluators: {reason}, wanted variables "
        "that change only by assign_add, of values of the batch alone. Change or remove this "
        "metric, start one evaluator, or give each evaluator a separate EvalSpec"
    )
