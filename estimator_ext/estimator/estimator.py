"""Estimator: the stock Estimator, trained on the ranks of a HostOffloadStrategy.

The stock class refuses a leaf class that overrides its methods, so they are overridden one class
above the leaf.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext import _tf_estimator
from estimator_ext._tf_estimator import ModeKeys, make_early_stopping_hook
from estimator_ext._tf_private import SaverHook
from estimator_ext.checkpoints.file_errors import translate_io_errors
from estimator_ext.checkpoints.model_dir_lock import training_in, training_without_ring
from estimator_ext.checkpoints.reading import (
    check_on_rank_0,
    check_partitions,
    check_shared,
    first_step,
)
from estimator_ext.checkpoints.saving import add_saver
from estimator_ext.data_workers.worker import check_is_no_data_worker, serve_if_data_worker
from estimator_ext.errors import UnsupportedError
from estimator_ext.estimator import training_graph
from estimator_ext.estimator.progress import write_evaluation
from estimator_ext.estimator.run_config import (
    RunConfig,
    adopt_cluster,
    number_of_workers,
    positive_integer,
)
from estimator_ext.estimator.steps import (
    check_limits,
    check_whole_loops,
    in_loop,
    run_on_host,
    whole_loops,
)
from estimator_ext.estimator.validation import (
    check_data,
    check_is_on_ranks,
    check_params,
    check_spec,
    check_takes_params,
    local_batch_sizes,
)
from estimator_ext.evaluation.evaluators import Evaluators, SumMetricsHook
from estimator_ext.graphs.global_step import GlobalStepCheckHook
from estimator_ext.options import options_of
from estimator_ext.session.guard import SessionCloseHook
from estimator_ext.session.hooks import EventsFilePerProcessHook
from estimator_ext.session.preemption import PreemptionHook
from estimator_ext.spec import Hooks, stock_spec
from estimator_ext.strategy.strategy import HostOffloadStrategy
from hostopt.tensorflow.background import HOST_DEVICE

_log = tf.get_logger()
InputFn = Callable[..., object]  # returns a dataset, features, or (features, labels)
ModelFn = Callable[..., _tf_estimator.EstimatorSpec]
_E = TypeVar("_E", bound="HostOffloadEstimator")
_Stock = TypeVar("_Stock", bound=_tf_estimator.Estimator)
_MAKES_HOOK = inspect.unwrap(make_early_stopping_hook).__code__  # without the deprecation wrapper


class HostOffloadEstimator(_tf_estimator.Estimator):
    """The stock Estimator with training on a ring; without a `HostOffloadStrategy`, the stock one.

    A subclass must call `_join_cluster` when the stock class is initialized.
    """

    _evaluators: Evaluators | None = None  # several evaluators that share the data
    _config: Any
    _is_on_ranks = False  # the graph of the training is built for all ranks

    @property
    def config(self) -> _tf_estimator.RunConfig:
        """A copy of the configuration.

        For TensorFlow's `make_early_stopping_hook`, which creates all hooks of early stopping and
        refuses a strategy, it is that of a process that trains alone. Any rank may request a stop
        at any time, and all ranks stop after the same step: that hook is right on every rank.
        """
        config = super().config
        is_on_ranks = isinstance(config.train_distribute, HostOffloadStrategy)
        if is_on_ranks and sys._getframe(1).f_code is _MAKES_HOOK:
            config._train_distribute = None
            config._is_chief = True
        return config

    def _join_cluster(self, *batch_sizes: int | None) -> None:
        """Takes the role of this process from the cluster; batch sizes are global, by mode."""
        if isinstance(self._eval_distribution, HostOffloadStrategy):
            raise hostopt.ConfigError(
                "RunConfig.eval_distribute is a HostOffloadStrategy, wanted None: one process "
                "evaluates. Give the strategy as train_distribute only"
            )
        strategy = self._train_distribution
        if isinstance(strategy, HostOffloadStrategy):
            self._config = copy.deepcopy(self._config)
            adopt_cluster(self._config, strategy)
            self._session_config = self._config.session_config
        if isinstance(self._config, RunConfig):
            self._config.check_loop()  # RunConfig.replace does not check it
        workers = number_of_workers(strategy)
        self._batch_sizes = local_batch_sizes(batch_sizes, workers, self._params)
        if self._is_strict:
            check_params(self._params)

    @property
    def _is_strict(self) -> bool:
        """True if the rules of accelerator estimators apply in addition to the stock ones."""
        is_own = isinstance(self._config, RunConfig)
        is_looped = self._iterations > 1
        return is_own and (self._config.strict or is_looped or bool(self._batch_sizes))

    @property
    def _iterations(self) -> int:
        return options_of(self._config).iterations_per_loop

    # -- training ---------------------------------------------------------------------------

    def train(
        self: _E,
        input_fn: InputFn,
        hooks: Hooks | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[tf.compat.v1.train.CheckpointSaverListener] | None = None,
    ) -> _E:
        check_limits(steps, max_steps)
        check_whole_loops(steps, self._iterations)
        if max_steps is not None:
            max_steps = whole_loops(max_steps, self._iterations)
        strategy = self._train_distribution
        serve_if_data_worker(strategy)
        if not isinstance(strategy, HostOffloadStrategy) or strategy.cluster.rank is None:
            with training_without_ring(self._model_dir, self._config):
                hooks = [*(hooks or ()), SessionCloseHook()]
                super().train(input_fn, hooks, steps, max_steps, saving_listeners)
            return self
        preemption = PreemptionHook(strategy.close)
        hooks = [*(hooks or ()), preemption]
        with (
            preemption.handled(),
            _errors_name_checkpoint(self._model_dir),
            strategy.propagate_errors(),
            translate_io_errors(self._model_dir),
            training_in(self._model_dir, strategy.communicator),
        ):
            communicator = strategy.communicator
            strategy.leave_records_in(self._model_dir)
            check_on_rank_0(communicator, self._model_dir, strategy.options.restore_previous)
            if max_steps is not None and first_step(communicator, self._model_dir) >= max_steps:
                _log.info("no training: step %d is reached already", max_steps)
                return self
            trainer = self
            if not strategy.cluster.is_chief:  # which alone restores and writes files
                trainer = _changed(self, _model_dir=None, _warm_start_settings=None)
            trainer._is_on_ranks = False
            arguments = (input_fn, hooks, steps, max_steps, saving_listeners)
            _tf_estimator.Estimator.train(trainer, *arguments)
            check_is_on_ranks(trainer)
            communicator.finish()
            preemption.share(communicator)
        return self

    def _train_model_default(self, *arguments: Any) -> Any:
        check_is_on_ranks(self)
        return super()._train_model_default(*arguments)

    def _train_model_distributed(
        self, input_fn: Callable[..., Any], hooks: Any, saving_listeners: Any
    ) -> Any:
        strategy = self._train_distribution
        if not isinstance(strategy, HostOffloadStrategy):
            return super()._train_model_distributed(input_fn, hooks, saving_listeners)
        config = self.config
        self._is_on_ranks = True
        functions = training_graph.ModelFunctions(
            lambda context: self._call_input_fn(input_fn, ModeKeys.TRAIN, context),
            "input_context" in _tf_estimator.fn_args(input_fn),
            self._create_and_assert_global_step,
            lambda features, labels: self._call_model_fn(features, labels, ModeKeys.TRAIN, config),
        )
        arguments = (strategy, self._config, self._model_dir, hooks, functions)
        while True:
            with training_graph.build(*arguments) as training:
                graph = (training.spec, training.first_hooks, hooks, training.global_step)
                loss = self._train_with_estimator_spec(*graph, saving_listeners)
            if not training.input_states.starts_over:
                return loss

    def _train_with_estimator_spec(
        self,
        estimator_spec: Any,
        worker_hooks: Any,
        hooks: Any,
        global_step_tensor: Any,
        saving_listeners: Any,
    ) -> Any:
        check_is_on_ranks(self)
        trainer = self
        if self._model_dir is None:  # a rank without files: its session restores and saves nothing
            config = self._config.replace(save_checkpoints_steps=None, save_checkpoints_secs=None)
            config._is_chief = True
            trainer = _changed(self, _config=config)
            hooks, its_hooks = map(_without_savers, (hooks, estimator_spec.training_hooks))
            estimator_spec = stock_spec(
                estimator_spec, training_hooks=its_hooks, training_chief_hooks=()
            )
            saving_listeners = ()
        if self._iterations > 1:
            estimator_spec = add_saver(estimator_spec, hooks, self._config, self._model_dir)
            estimator_spec = in_loop(estimator_spec, self._config, hooks)
            # the hooks of the loop report in place of those of the stock class
            config = self._config.replace(save_summary_steps=0, log_step_count_steps=None)
            trainer = _changed(self, _config=config)
        all_hooks = [*hooks, *estimator_spec.training_hooks]
        if _needs_global_step(self._train_distribution, all_hooks):
            check = GlobalStepCheckHook(global_step_tensor)  # [K15] of `training_graph`
            estimator_spec = stock_spec(
                estimator_spec, training_hooks=[*estimator_spec.training_hooks, check]
            )
        return _tf_estimator.Estimator._train_with_estimator_spec(
            trainer, estimator_spec, worker_hooks, hooks, global_step_tensor, saving_listeners
        )

    # -- evaluation, prediction and export --------------------------------------------------

    def evaluate(
        self,
        input_fn: InputFn,
        steps: int | None = None,
        hooks: Hooks | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        check_whole_loops(steps, self._iterations)
        self._check_has_files("evaluate", checkpoint_path)
        hooks = [*(hooks or ()), EventsFilePerProcessHook(self.eval_dir(name)), SessionCloseHook()]
        scope = _io_errors_of(self._train_distribution, self._model_dir)
        if self._evaluators is not None:
            steps = self._evaluators.local_steps(steps)
            checkpoint_path = checkpoint_path or self.latest_checkpoint()
            scope = self._evaluators.evaluation(checkpoint_path, self._model_dir)
        with scope:
            metrics = super().evaluate(input_fn, steps, hooks, checkpoint_path, name)
        return write_evaluation(metrics, name)

    def _evaluate_run(self, *, eval_dict: Any, all_hooks: Any, **arguments: Any) -> Any:
        if self._evaluators is not None:
            all_hooks = [SumMetricsHook(self._evaluators, eval_dict), *all_hooks]
        return super()._evaluate_run(eval_dict=eval_dict, all_hooks=all_hooks, **arguments)

    def predict(
        self,
        input_fn: InputFn,
        predict_keys: Sequence[str] | None = None,
        hooks: Hooks | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
        num_predictions: int | None = None,
    ) -> Iterator[Any]:
        self._check_has_files("predict", checkpoint_path)
        hooks = [*(hooks or ()), SessionCloseHook()]
        predictions: Generator[Any, None, None] = super().predict(
            input_fn, predict_keys, hooks, checkpoint_path, yield_single_examples
        )
        if num_predictions is None:
            return predictions
        positive_integer("num_predictions", num_predictions, most=sys.maxsize)
        return _take_predictions(predictions, num_predictions, yield_single_examples)

    def _export_all_saved_models(
        self, export_dir_base: str, *arguments: Any, **options: Any
    ) -> Any:
        strategy = self._train_distribution
        check_is_no_data_worker(strategy, "export")
        if isinstance(strategy, HostOffloadStrategy) and strategy.cluster.rank:
            # exports are named by the second; other ranks may export in the same second
            export_dir_base = os.path.join(
                tf.compat.as_str(export_dir_base), f".rank-{strategy.cluster.rank}"
            )
        with _io_errors_of(strategy, tf.compat.as_str(export_dir_base)):
            return super()._export_all_saved_models(export_dir_base, *arguments, **options)

    def _check_has_files(self, call: str, checkpoint_path: str | None) -> None:
        """Checks that a rank does not evaluate initial values because rank 0 has the files."""
        strategy = self._train_distribution
        check_is_no_data_worker(strategy, call)
        if isinstance(strategy, HostOffloadStrategy) and checkpoint_path is None:
            check_shared(call, strategy.cluster, self._model_dir)

    # -- input_fn and model_fn --------------------------------------------------------------

    def _call_input_fn(
        self,
        input_fn: Callable[..., Any],
        mode: str,
        input_context: tf.distribute.InputContext | None = None,
    ) -> Any:
        if mode in self._batch_sizes:
            check_takes_params(input_fn, mode)
        if input_context is None and mode == ModeKeys.EVAL and self._evaluators is not None:
            input_context = self._evaluators.input_context
        # a process that reads all data is the only input pipeline
        context = input_context or tf.distribute.InputContext(1, 0, 1)
        params = self._params_of(mode)
        data = _tf_estimator.Estimator._call_input_fn(
            _changed(self, _params=params), input_fn, mode, context
        )
        if self._is_strict:
            check_data(data)
        depth = options_of(self._config).prefetch_depth
        return _prefetched(data, depth) if mode == ModeKeys.TRAIN and depth else data

    def _params_of(self, mode: str) -> dict[str, Any]:
        size = self._batch_sizes.get(mode)
        return self._params if size is None else {**self._params, "batch_size": size}

    def _call_model_fn(self, features: Any, labels: Any, mode: str, config: Any) -> Any:
        params = self._params_of(mode)
        spec = _tf_estimator.Estimator._call_model_fn(
            _changed(self, _params=params), features, labels, mode, config
        )
        if self._is_strict:
            check_spec(spec, mode)
        if number_of_workers(self._train_distribution) > 1 and mode != ModeKeys.TRAIN:
            check_partitions(tf.train.latest_checkpoint(self._model_dir))
        return run_on_host(spec, mode, self._iterations)


class Estimator(HostOffloadEstimator):
    """Trains and evaluates a model_fn; takes the arguments of `tf.estimator.Estimator`.

    With a `HostOffloadStrategy` as `RunConfig.train_distribute` every rank trains. Gradients are
    reduced over the ranks on the host. Rank 0 alone restores and writes checkpoints and summaries;
    the other ranks start with its values. Without such a strategy it is the stock class.

    Batch sizes are global. Each process finds its batch size in `params["batch_size"]`, in
    input_fn and model_fn. In training it is the global size divided by the number of workers; one
    process evaluates or predicts. The params of the user are not changed. `predict` has the
    additional argument num_predictions: the number of examples after which it ends.

    input_fn, model_fn and params follow the stock rules. The strict rules of accelerator
    estimators apply with `RunConfig(strict=True)`, with iterations_per_loop above 1, and with a
    batch size.

    Args:
      model_fn: returns an `estimator_ext.EstimatorSpec` or a `tf.estimator.EstimatorSpec`.
      model_dir: directory in which rank 0 restores and writes, and in which evaluators read.
      config: an `estimator_ext.RunConfig` or `tf.estimator.RunConfig`.
      params: dict for model_fn and input_fn, if they have an argument `params`.
      warm_start_from: checkpoint or settings from which rank 0 starts a new training.
      train_batch_size: number of examples in a training step of all workers.
      eval_batch_size: number of examples in a batch of evaluation.
      predict_batch_size: number of examples in a batch of prediction.

    Raises:
      ValueError: a batch size is not a positive integer, or not divisible by the number of
        workers, or params has a batch size too; by the strict rules, params has the reserved key
        'input_fn'.
      hostopt.ConfigError: eval_distribute is a `HostOffloadStrategy`.
    """

    def __init__(
        self,
        model_fn: ModelFn,
        model_dir: str | os.PathLike[str] | None = None,
        config: _tf_estimator.RunConfig | None = None,
        params: Mapping[str, object] | None = None,
        warm_start_from: str | _tf_estimator.WarmStartSettings | None = None,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
    ) -> None:
        super().__init__(model_fn, model_dir, config, params, warm_start_from)
        self._join_cluster(train_batch_size, eval_batch_size, predict_batch_size)


def adopt(estimator: _Stock) -> _Stock:
    """Makes an estimator of any class train like `Estimator`, in place.

    This is for canned estimators and subclasses of `tf.estimator.Estimator`.

    Args:
      estimator: a `tf.estimator.Estimator` whose config has a `HostOffloadStrategy` as
        train_distribute.

    Raises:
      hostopt.ConfigError: eval_distribute is a `HostOffloadStrategy`.
      UnsupportedError: the class overrides `train`, and there are several ranks.
    """
    kind: Any = type(estimator)
    if issubclass(kind, HostOffloadEstimator):
        return estimator
    size = number_of_workers(estimator._train_distribution)
    if kind.train is not _tf_estimator.estimator_v1.Estimator.train and size > 1:
        raise UnsupportedError(
            f"{kind.__module__}.{kind.__qualname__} overrides the method `train`, which does not "
            f"support ranks, and there are {size}. Train it in one process, without `hostopt run`"
        )
    estimator.__class__ = _adopted(kind)
    estimator._join_cluster()
    return estimator


@functools.cache
def _adopted(kind: Any) -> type:
    members: dict[str, Any] = {"__module__": kind.__module__}
    if not issubclass(kind, _tf_estimator.Estimator):  # a class of tf.compat.v1 that exports
        members["export_savedmodel"] = kind.export_savedmodel
    bases = () if issubclass(HostOffloadEstimator, kind) else (kind,)
    return type(kind.__name__, (*bases, HostOffloadEstimator), members)


def _changed(estimator: _E, **attributes: Any) -> _E:
    result = copy.copy(estimator)
    result.__dict__.update(attributes)
    return result


def _prefetched(data: Any, depth: int) -> tf.data.Dataset:
    if not isinstance(data, tf.data.Dataset):
        raise ValueError(
            f"RunConfig.prefetch_depth is {depth} and input_fn returned a {type(data).__name__}, "
            "wanted a tf.data.Dataset: only a dataset can be prefetched. Return a dataset, or "
            "leave prefetch_depth out"
        )
    with tf.device(HOST_DEVICE):
        return data.prefetch(depth)


def _without_savers(hooks: Hooks) -> list[Any]:
    return [hook for hook in hooks if not isinstance(hook, SaverHook)]


@contextlib.contextmanager
def _errors_name_checkpoint(model_dir: str) -> Iterator[None]:
    try:
        yield
    except hostopt.HostOptError as error:
        checkpoint = None
        if not isinstance(error, hostopt.CheckpointError):  # which names it already
            with contextlib.suppress(tf.errors.OpError, ValueError):
                checkpoint = tf.train.latest_checkpoint(model_dir)  # checks that it has an index
        error.resume_from(checkpoint)
        raise


def _io_errors_of(strategy: Any, directory: str) -> contextlib.AbstractContextManager[None]:
    """Returns `translate_io_errors`, which does nothing without a `HostOffloadStrategy`."""
    return translate_io_errors(directory if isinstance(strategy, HostOffloadStrategy) else None)


def _needs_global_step(strategy: Any, hooks: Sequence[Any]) -> bool:
    """True if a training must increment global_step, as it could not be resumed or ended."""
    if isinstance(strategy, HostOffloadStrategy) and strategy.cluster.size > 1:
        return True
    is_limited = any(isinstance(h, tf.compat.v1.train.StopAtStepHook) for h in hooks)
    return is_limited and (strategy is None or isinstance(strategy, HostOffloadStrategy))


def _take_predictions(
    predictions: Generator[Any, None, None], number: int, single: bool
) -> Iterator[Any]:
    """Takes the predictions of the first examples; the last batch is not cut.

    The session and its hooks have ended, as if at the end of the data, before the last one is
    yielded. A prediction that is not `single` is of a batch.
    """
    seen = 0
    for prediction in predictions:
        seen += 1 if single else _count_examples(prediction)
        if seen >= number:  # ends the session, so that the `end` of the hooks is called
            with contextlib.suppress(StopIteration):
                predictions.throw(tf.errors.OutOfRangeError(None, None, "enough predictions"))
        yield prediction


def _count_examples(batch: Any) -> int:
    value = next(iter(batch.values())) if isinstance(batch, dict) else batch
    return len(value) if np.ndim(value) else 1
