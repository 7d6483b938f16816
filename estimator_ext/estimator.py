"""Estimator: the stock one, trained on the ranks of a HostOffloadStrategy."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext import _tf_estimator
from estimator_ext._tf_estimator import ModeKeys
from estimator_ext.accumulation import Accumulation
from estimator_ext.agreement import BeginAgreementHook, EndAgreementHook
from estimator_ext.batch_size import BatchSizes
from estimator_ext.checkpoints import (
    check_on_rank_0,
    check_shared,
    newest,
    saving_well,
)
from estimator_ext.desync import DesyncCheckHook
from estimator_ext.early_stopping import config_for
from estimator_ext.errors import UnsupportedError
from estimator_ext.evaluators import Evaluators
from estimator_ext.file_errors import errors_of_files
from estimator_ext.fingerprint import Updates, read_updates
from estimator_ext.global_step import GlobalStepCheckHook, read_before_changes
from estimator_ext.gradient_marks import TrainingGraph
from estimator_ext.hooks import BroadcastVariablesHook, OwnEventsFileHook
from estimator_ext.host_call import run_on_host
from estimator_ext.input_kinds import log_limits, prefetched
from estimator_ext.input_state import InputStateHook, InputStates, name_random_operations
from estimator_ext.loop import check_limits, check_whole_loops, in_loop, whole_loops
from estimator_ext.loop_hooks import without_reports
from estimator_ext.metric_sums import SumMetricsHook
from estimator_ext.model_dir_lock import training_in
from estimator_ext.predictions import first
from estimator_ext.preemption import Preemption, PreemptionHook
from estimator_ext.run_config import RunConfig, adopt_cluster, whole_number
from estimator_ext.session_guard import SessionGuardHook
from estimator_ext.sharding import dividing
from estimator_ext.skipped_updates import HooksWithoutNan
from estimator_ext.spec import stock_spec
from estimator_ext.step_report import StepReportHook, show_steps
from estimator_ext.strategy import HostOffloadStrategy, loss_is_scaled
from estimator_ext.strict_rules import check_data, check_params, check_spec
from estimator_ext.sync_on_read import SyncOnRead
from estimator_ext.uneven_data import (
    MODES,
    BatchWeights,
    count_examples,
    endless,
    followed,
    goes_on,
)
from estimator_ext.unreduced_updates import (
    check_mended,
    mend_unreduced_updates,
    warn_of_own_variables,
)

__all__: list[str] = []

_log = tf.get_logger()


class _HostOffloadEstimator(_tf_estimator.Estimator):
    """What `Estimator` does differently.

    The stock class refuses a leaf class that overrides its methods, so they are overridden here,
    one class above the leaf.
    """

    _evaluators: Evaluators | None = None  # those with whom this one evaluates

    @property
    def config(self) -> Any:
        return config_for(sys._getframe(1), super().config)

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Any = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Any = None,
    ) -> _HostOffloadEstimator:
        check_limits(steps, max_steps)
        check_whole_loops(steps, self._iterations)
        if max_steps is not None:
            max_steps = whole_loops(max_steps, self._iterations)
        strategy = self._train_distribution
        if not isinstance(strategy, HostOffloadStrategy) or strategy.cluster.rank is None:
            is_chief = self._config.is_chief
            with training_in(self._model_dir) if is_chief else contextlib.nullcontext():
                super().train(input_fn, hooks, steps, max_steps, saving_listeners)
            return self
        preemption = Preemption(strategy.close)
        hooks = [*(hooks or ()), PreemptionHook(preemption)]
        with (
            preemption.handled(),
            self._errors_with_checkpoint(),
            strategy.errors_told(),
            errors_of_files(self._model_dir),
            training_in(self._model_dir, strategy.communicator),
        ):
            communicator = strategy.communicator
            strategy.leave_records_in(self._model_dir)
            check_on_rank_0(communicator, self._model_dir, strategy.options.restore_previous)
            if max_steps is not None and self._agreed_start_step() >= max_steps:
                _log.info("no training: step %d is reached already", max_steps)
                return self
            trainer = self if strategy.cluster.is_chief else self._without_files()
            arguments = (input_fn, hooks, steps, max_steps, saving_listeners)
            _tf_estimator.Estimator.train(trainer, *arguments)
            communicator.finish()
            preemption.agree(communicator)
        return self

    @contextlib.contextmanager
    def _errors_with_checkpoint(self) -> Iterator[None]:
        """Have an error that leaves the block say from which checkpoint the training can go on."""
        try:
            yield
        except hostopt.HostOptError as error:
            checkpoint = None
            if not isinstance(error, hostopt.CheckpointError):  # which knows it, if there is one
                with contextlib.suppress(tf.errors.OpError, ValueError):
                    checkpoint = tf.train.latest_checkpoint(self._model_dir)  # it has an index
            error.resume_from(checkpoint)
            raise

    def _agreed_start_step(self) -> int:
        """global_step of rank 0's newest checkpoint; the ranks need share no file system."""
        communicator = self._train_distribution.communicator
        own = _saved_step(self._model_dir) if communicator.rank == 0 else 0
        return int(communicator.broadcast(np.array(own, np.int64), what="the step to start from"))

    def _without_files(self) -> _HostOffloadEstimator:
        """This estimator as a rank uses it that neither restores nor writes anything."""
        trainer = copy.copy(self)
        trainer._model_dir = None
        trainer._warm_start_settings = None
        return trainer

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Any = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        check_whole_loops(steps, self._iterations)
        self._check_has_files("evaluate", checkpoint_path)
        hooks = [*(hooks or ()), OwnEventsFileHook(self.eval_dir(name))]
        if self._evaluators is None:
            with self._errors_of_files(self._model_dir):
                return super().evaluate(input_fn, steps, hooks, checkpoint_path, name)
        steps = self._evaluators.share(steps)
        with self._evaluators.round(checkpoint_path, self._model_dir):
            return super().evaluate(input_fn, steps, hooks, checkpoint_path, name)

    def _evaluate_run(self, *, eval_dict: Any, all_hooks: Any, **arguments: Any) -> dict[str, Any]:
        if self._evaluators is not None:
            all_hooks = [SumMetricsHook(self._evaluators, eval_dict), *all_hooks]
        return super()._evaluate_run(eval_dict=eval_dict, all_hooks=all_hooks, **arguments)

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Any = None,
        hooks: Any = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
        num_predictions: int | None = None,
    ) -> Iterator[Any]:
        self._check_has_files("predict", checkpoint_path)
        predictions = super().predict(
            input_fn, predict_keys, hooks, checkpoint_path, yield_single_examples
        )
        if num_predictions is None:
            return predictions
        whole_number("num_predictions", num_predictions, most=sys.maxsize)
        return first(predictions, num_predictions, yield_single_examples)

    def _export_all_saved_models(
        self, export_dir_base: str, *arguments: Any, **options: Any
    ) -> bytes:
        strategy = self._train_distribution
        if isinstance(strategy, HostOffloadStrategy) and strategy.cluster.rank:
            # directories are named by the second, in which the others may export, too
            export_dir_base = os.path.join(
                tf.compat.as_str(export_dir_base), f".rank-{strategy.cluster.rank}"
            )
        with self._errors_of_files(tf.compat.as_str(export_dir_base)):
            return super()._export_all_saved_models(export_dir_base, *arguments, **options)

    def _errors_of_files(self, directory: str) -> contextlib.AbstractContextManager[None]:
        """`errors_of_files`; without a strategy of ours they are those of the stock class."""
        is_ours = isinstance(self._train_distribution, HostOffloadStrategy)
        return errors_of_files(directory if is_ours else None)

    def _check_has_files(self, call: str, checkpoint_path: str | None) -> None:
        """Refuse to work from initial values where rank 0 alone has what was trained."""
        strategy = self._train_distribution
        if isinstance(strategy, HostOffloadStrategy) and checkpoint_path is None:
            check_shared(call, strategy.cluster, self._model_dir)

    def _train_model_distributed(
        self, input_fn: Callable[..., Any], hooks: Any, saving_listeners: Any
    ) -> Any:
        strategy = self._train_distribution
        if not isinstance(strategy, HostOffloadStrategy):
            return super()._train_model_distributed(input_fn, hooks, saving_listeners)
        with (
            contextlib.ExitStack() as stack,
            TrainingGraph().as_default() as graph,
            strategy.extended.training_graph(),  # which tells the others of errors
            errors_of_files(self._model_dir),
        ):
            tf.compat.v1.set_random_seed(self._config.tf_random_seed)
            communicator = strategy.communicator
            features, labels, input_hooks, more = self._training_input(input_fn, strategy)
            data = set(graph.get_operations())
            guard = SessionGuardHook(data)
            states = InputStates(communicator.duplicate("the data"), guard, more)
            global_step = self._create_and_assert_global_step(graph)
            graph.marks_gradients = strategy.extended.uses_gradients_of_graph
            spec = strategy.extended.call_for_each_replica(
                self._call_model_fn, args=(features, labels, ModeKeys.TRAIN, self.config)
            )
            graph.marks_gradients = False
            spec, updates, suspects = _with_reductions(strategy, spec, data)
            # before the input hooks and all others: they may read what is broadcast
            first_hooks = [BroadcastVariablesHook(communicator), *input_hooks]
            reducers = strategy.extended.reducers
            if reducers:  # none with one rank, or where nothing is reduced in buckets
                if communicator.transport.timeline is not None:
                    spec = show_steps(spec, reducers, communicator.transport.timeline)
                every_steps = self._config.save_summary_steps or 0
                own = communicator.duplicate("step reports")
                first_hooks.append(StepReportHook(own, reducers, every_steps, self._model_dir))
            if strategy.extended.accumulation is not None:
                hook = strategy.extended.accumulation.hook()
                spec = stock_spec(spec, training_hooks=[*spec.training_hooks, hook])
            # after all hooks that may initialise iterators
            restored = newest(self._model_dir) if strategy.cluster.is_chief else None
            own_hooks = [*spec.training_hooks, InputStateHook(states, restored)]
            spec = stock_spec(spec, training_hooks=own_hooks)
            agreeing: list[Any] = []
            for hook in hooks:
                if isinstance(hook, PreemptionHook):
                    hook.preemption.saves = self._saves(spec, hooks)
            if strategy.cluster.is_chief:
                spec = self._with_saver(spec, hooks)  # so that others can come before it
                savers = _all_savers(spec, hooks)
                for saver in savers:
                    stack.enter_context(saving_well(saver, restored))
                states.listen(savers)
                name_random_operations(spec.train_op, data)
            if updates is not None:
                communicator.check_same(updates.texts, "the updates of variables")
                checks = self._desync_checks(strategy, updates.mirrored, suspects)
                spec, agreeing = self._agreeing(strategy, spec, hooks, checks, states)
            if strategy.cluster.is_chief:  # its own hooks, its saver among them, run before all
                chief_hooks = [guard, *agreeing, *spec.training_chief_hooks]
                spec = stock_spec(spec, training_chief_hooks=chief_hooks)
            else:
                first_hooks = [guard, *first_hooks, *agreeing]
            if strategy.options.nonfinite != "error":
                first_hooks = HooksWithoutNan(first_hooks)
            return self._train_with_estimator_spec(
                spec, first_hooks, hooks, global_step, saving_listeners
            )

    def _agreeing(
        self,
        strategy: HostOffloadStrategy,
        spec: Any,
        hooks: Any,
        checks: Sequence[DesyncCheckHook],
        states: InputStates,
    ) -> tuple[Any, list[Any]]:
        """The spec with what ends a step in agreement, and the hooks that begin with it."""
        communicator, flags = strategy.communicator, strategy.extended.flags
        own = communicator.duplicate("variables that are synchronised when they are read")
        sync_on_read = SyncOnRead(own, tf.compat.v1.global_variables())
        is_chief = strategy.cluster.is_chief
        all_hooks = [
            *hooks,
            *spec.training_hooks,
            *(spec.training_chief_hooks if is_chief else ()),
        ]
        begin = BeginAgreementHook(communicator, flags, sync_on_read, states, _savers(all_hooks))
        end = EndAgreementHook(communicator, flags, all_hooks)
        spec = stock_spec(spec, training_hooks=[*spec.training_hooks, end])
        return spec, [begin, *checks]

    def _desync_checks(
        self,
        strategy: HostOffloadStrategy,
        mirrored: Sequence[tf.Variable],
        suspects: Mapping[str, str],
    ) -> list[DesyncCheckHook]:
        every_steps = strategy.options.desync_check_steps
        if not every_steps:
            return []
        own = strategy.communicator.duplicate("the variables of the ranks")
        return [DesyncCheckHook(own, mirrored, every_steps, self._iterations, suspects)]

    def _with_saver(self, spec: Any, hooks: Any) -> Any:
        """The spec with the saver that the stock class would add later, if it would."""
        config = self._config
        if _all_savers(spec, hooks) or not self._saves(spec, hooks):
            return spec
        saver = tf.compat.v1.train.CheckpointSaverHook(
            self._model_dir,
            save_secs=config.save_checkpoints_secs,
            save_steps=config.save_checkpoints_steps,
            scaffold=spec.scaffold,
            save_graph_def=config.checkpoint_save_graph_def,
        )
        return stock_spec(spec, training_chief_hooks=[saver, *spec.training_chief_hooks])

    def _saves(self, spec: Any, hooks: Any) -> bool:
        """Whether the chief saves checkpoints."""
        config = self._config
        by_config = config.save_checkpoints_secs or config.save_checkpoints_steps
        return bool(by_config or _all_savers(spec, hooks))

    def _training_input(
        self, input_fn: Callable[..., Any], strategy: HostOffloadStrategy
    ) -> tuple[Any, Any, list[Any], tf.Tensor]:
        """Features, labels, hooks, whether there are more; tells the strategy of each batch."""
        extended, communicator = strategy.extended, strategy.communicator
        micro_batches = getattr(self._config, "accumulate_steps", 1)
        context = extended.input_context()
        shards_itself = "input_context" in _tf_estimator.fn_args(input_fn)
        if communicator.size == 1 or shards_itself:
            data = self._call_input_fn(input_fn, ModeKeys.TRAIN, context)
        else:
            with dividing(communicator, context, extended.auto_shard) as divide:
                data = divide(self._call_input_fn(input_fn, ModeKeys.TRAIN, context))
        if communicator.rank == 0:
            log_limits(data, communicator.size)
        if communicator.size == 1 or not followed(data, communicator, self._session_config):
            if micro_batches > 1:
                extended.accumulation = Accumulation(micro_batches)
            features, labels, hooks = _tf_estimator.parse_input_fn_result(data)
            return features, labels, hooks, goes_on((features, labels))
        # features and labels, and whether they are new, stand where features and labels do
        batch, new, hooks = _tf_estimator.parse_input_fn_result(endless(data))
        counts = count_examples(batch, new)
        if micro_batches > 1:
            accumulation = extended.accumulation = Accumulation(micro_batches, counts[0])
            counts = [accumulation.all_examples, accumulation.total(counts[1], "batches")]
        mode = getattr(self._config, "uneven_data", MODES[0])
        extended.weights = BatchWeights(*counts, communicator, mode)
        if extended.accumulation is None:  # in a step that has no data nothing is computed
            with tf.control_dependencies([extended.weights.in_mean]):
                batch = tf.nest.map_structure(tf.identity, batch)
        if not isinstance(batch, (list, tuple)):
            return batch, None, hooks, new
        if len(batch) != 2:
            raise ValueError("input_fn should return (features, labels) as a len 2 tuple.")
        return batch[0], batch[1], hooks, new

    def _train_with_estimator_spec(
        self,
        estimator_spec: Any,
        worker_hooks: Any,
        hooks: Any,
        global_step_tensor: Any,
        saving_listeners: Any,
    ) -> Any:
        trainer = self
        if self._model_dir is None:  # a rank without files: a chief of its own that saves nothing
            trainer = copy.copy(self)
            trainer._config = self._config.replace(
                save_checkpoints_steps=None, save_checkpoints_secs=None
            )
            trainer._config._is_chief = True
            estimator_spec = stock_spec(estimator_spec, training_chief_hooks=())
            saving_listeners = ()
        if self._iterations > 1:
            estimator_spec = self._with_saver(estimator_spec, hooks)
            estimator_spec = in_loop(estimator_spec, self._config, hooks)
            trainer = copy.copy(self)
            trainer._config = without_reports(self._config)
        if self._needs_global_step([*hooks, *estimator_spec.training_hooks]):
            check = GlobalStepCheckHook(global_step_tensor)
            all_hooks = [*estimator_spec.training_hooks, check]
            estimator_spec = stock_spec(estimator_spec, training_hooks=all_hooks)
        return _tf_estimator.Estimator._train_with_estimator_spec(
            trainer, estimator_spec, worker_hooks, hooks, global_step_tensor, saving_listeners
        )

    def _needs_global_step(self, hooks: Sequence[Any]) -> bool:
        """Whether a training could not go on, or not end, with a global_step that stands still."""
        strategy = self._train_distribution
        if isinstance(strategy, HostOffloadStrategy) and strategy.cluster.size > 1:
            return True
        is_limited = any(isinstance(h, tf.compat.v1.train.StopAtStepHook) for h in hooks)
        return is_limited and (strategy is None or isinstance(strategy, HostOffloadStrategy))

    def _call_input_fn(
        self,
        input_fn: Callable[..., Any],
        mode: str,
        input_context: tf.distribute.InputContext | None = None,
    ) -> Any:
        self._batch_sizes.check_input_fn(input_fn, mode)
        if input_context is None and mode == ModeKeys.EVAL and self._evaluators is not None:
            input_context = self._evaluators.input_context
        # one process reads all data: a pipeline of its own for whoever asks for one
        context = input_context or tf.distribute.InputContext(1, 0, 1)
        data = _tf_estimator.Estimator._call_input_fn(self._in_mode(mode), input_fn, mode, context)
        if self._is_strict:
            check_data(data)
        depth = getattr(self._config, "prefetch_depth", None)
        return prefetched(data, depth) if mode == ModeKeys.TRAIN and depth else data

    def _call_model_fn(self, features: Any, labels: Any, mode: str, config: Any) -> Any:
        spec = _tf_estimator.Estimator._call_model_fn(
            self._in_mode(mode), features, labels, mode, config
        )
        if self._is_strict:
            check_spec(spec, mode)
        return run_on_host(spec, mode, self._iterations)

    def _in_mode(self, mode: str) -> _HostOffloadEstimator:
        """This estimator with the params of a mode."""
        estimator = copy.copy(self)
        estimator._params = self._batch_sizes.add_to(self._params, mode)
        return estimator

    def _join_cluster(
        self,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
    ) -> None:
        """Takes the role that the strategy's cluster says, when the stock class is initialised."""
        if isinstance(self._eval_distribution, HostOffloadStrategy):
            raise hostopt.ConfigError(
                "RunConfig.eval_distribute is a HostOffloadStrategy, wanted None: one process "
                "evaluates. Give the strategy as train_distribute only"
            )
        if isinstance(self._train_distribution, HostOffloadStrategy):
            self._config = copy.deepcopy(self._config)
            adopt_cluster(self._config, self._train_distribution)
            self._session_config = self._config.session_config
        if isinstance(self._config, RunConfig):
            self._config.check_loop()  # what `replace` has made of it
        strategy = self._train_distribution
        workers = strategy.num_replicas_in_sync if strategy else 1
        self._batch_sizes = BatchSizes(
            train_batch_size, eval_batch_size, predict_batch_size, workers, self._params
        )
        if self._is_strict:
            check_params(self._params)

    @property
    def _is_strict(self) -> bool:
        """Whether the accelerator estimator's rules apply, beyond the stock ones."""
        if not isinstance(self._config, RunConfig):
            return False
        return self._config.strict or self._iterations > 1 or self._batch_sizes.any

    @property
    def _iterations(self) -> int:
        return getattr(self._config, "iterations_per_loop", 1)


class Estimator(_HostOffloadEstimator):
    """Trains and evaluates a model_fn; takes the arguments of `tf.estimator.Estimator`.

    With a `HostOffloadStrategy` as `RunConfig.train_distribute` every rank trains, gradients are
    reduced over the ranks on the host, and rank 0 alone restores and writes checkpoints and
    summaries; the others start from its values. Without one it works like the stock class.

    Batch sizes are global. Each process finds its part in `params["batch_size"]`, in input_fn and
    model_fn: in training the batch size divided by the number of workers; one process evaluates
    or predicts. The user's params are not changed. `predict` takes num_predictions besides the
    stock arguments: the number of examples after which it ends.

    input_fn, model_fn and params follow the stock rules. The strict ones of accelerator estimators
    apply with `RunConfig(strict=True)`, with iterations_per_loop above 1, and with a batch size.

    Args:
      model_fn: returns an `estimator_ext.EstimatorSpec` or a `tf.estimator.EstimatorSpec`.
      model_dir: where rank 0 restores and writes, and where evaluators read.
      config: an `estimator_ext.RunConfig` or `tf.estimator.RunConfig`.
      params: dict that model_fn and input_fn receive, if they have such an argument.
      warm_start_from: checkpoint or settings that rank 0 starts a fresh training from.
      train_batch_size: number of examples of a step, of all workers together.
      eval_batch_size: number of examples of a batch in evaluation.
      predict_batch_size: number of examples of a batch in prediction.

    Raises:
      ValueError: a batch size is no whole number above 0 or not divisible by the number of
        workers, or params has one too; under the strict rules, params has the reserved key
        'input_fn'.
      hostopt.ConfigError: a `HostOffloadStrategy` is to evaluate.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: Any = None,
        config: Any = None,
        params: dict[str, Any] | None = None,
        warm_start_from: Any = None,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
    ) -> None:
        super().__init__(model_fn, model_dir, config, params, warm_start_from)
        self._join_cluster(train_batch_size, eval_batch_size, predict_batch_size)


def adopt(estimator: Any) -> Any:
    """Makes an estimator of any class train as `Estimator` does, in place.

    For canned estimators and subclasses of `tf.estimator.Estimator`.

    Args:
      estimator: a `tf.estimator.Estimator` whose config has a `HostOffloadStrategy` as
        train_distribute.

    Returns:
      The same estimator.

    Raises:
      hostopt.ConfigError: a `HostOffloadStrategy` is to evaluate.
      UnsupportedError: the class trains by itself, and there are several ranks.
    """
    kind = type(estimator)
    if not issubclass(kind, _HostOffloadEstimator):
        _check_trains_as_stock(estimator)
        estimator.__class__ = _adopted(kind)
        estimator._join_cluster()
    return estimator


def _check_trains_as_stock(estimator: Any) -> None:
    kind, strategy = type(estimator), estimator._train_distribution
    if (
        kind.train is not _tf_estimator.estimator_v1.Estimator.train
        and strategy.num_replicas_in_sync > 1
    ):
        raise UnsupportedError(
            f"{kind.__module__}.{kind.__qualname__} has a method `train` of its own, which knows "
            f"of no ranks, and there are {strategy.num_replicas_in_sync}. Train it in one "
            "process, without `hostopt run`"
        )


@functools.cache
def _adopted(kind: type) -> type:
    members: dict[str, Any] = {"__module__": kind.__module__}
    if not issubclass(kind, _tf_estimator.Estimator):  # one of tf.compat.v1, which has it
        members["export_savedmodel"] = kind.export_savedmodel
    own = () if issubclass(_HostOffloadEstimator, kind) else (kind,)
    return type(kind.__name__, (*own, _HostOffloadEstimator), members)


def _all_savers(spec: Any, hooks: Any) -> list[tf.compat.v1.train.CheckpointSaverHook]:
    return _savers([*hooks, *spec.training_hooks, *spec.training_chief_hooks])


def _savers(hooks: Sequence[Any]) -> list[tf.compat.v1.train.CheckpointSaverHook]:
    return [h for h in hooks if isinstance(h, tf.compat.v1.train.CheckpointSaverHook)]


def _saved_step(model_dir: str) -> int:
    path = tf.train.latest_checkpoint(model_dir)
    return int(tf.train.load_variable(path, "global_step")) if path else 0


def _with_reductions(
    strategy: HostOffloadStrategy, spec: Any, data: Collection[tf.Operation]
) -> tuple[Any, Updates | None, Mapping[str, str]]:
    """The spec whose step makes all reductions, what it does, and what may differ by rank."""
    extended = strategy.extended
    targets = _operations_of_step(spec)
    updates, suspects, is_mean = None, {}, loss_is_scaled()
    is_alone = strategy.num_replicas_in_sync == 1
    read_before_changes(targets)
    if extended.uses_gradients_of_graph:
        data = {*data, *tf.compat.v1.get_default_graph().scale_factors}
        updates = read_updates(targets, data, extended.sums)
        if mend_unreduced_updates(strategy, updates, data):
            is_mean = not tf.compat.v1.get_default_graph().is_sum([spec.loss])
            updates = read_updates(targets, data, extended.sums)
        extended.check_skipped(updates)
    if is_alone:
        updates = None  # there is nobody to compare them with
    elif updates is not None:
        suspects = check_mended(updates, data)
        warn_of_own_variables(updates)
    _check_accumulation(strategy)
    loss = spec.loss
    if extended.accumulation is not None:
        loss = extended.accumulation.mean(loss, "loss")
    is_same = updates.is_same if updates else lambda tensor: False
    loss, last = extended.build_step(targets, is_same, loss, is_mean)
    # the step of each rank makes all reductions, and ends when the data do
    also = [*last, *([] if extended.weights is None else [extended.weights.in_mean])]
    train_op = tf.group(spec.train_op, *also) if also else spec.train_op
    return stock_spec(spec, loss=loss, train_op=train_op), updates, suspects


def _check_accumulation(strategy: HostOffloadStrategy) -> None:
    accumulation = strategy.extended.accumulation
    if accumulation is not None and not accumulation.is_used:
        raise hostopt.ConfigError(
            f"accumulate_steps is {accumulation.micro_batches}, but the step updates no variable "
            "with a gradient that is computed outside of branches, loops and functions. Compute "
            "gradients outside of them, or leave accumulate_steps out"
        )


def _operations_of_step(spec: Any) -> list[tf.Operation]:
    """What runs in each step, or in those that show summaries."""
    shown = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SUMMARIES)
    values = [spec.train_op, spec.loss, *shown]
    return list(dict.fromkeys(getattr(value, "op", value) for value in values))
