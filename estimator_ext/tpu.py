"""TPUEstimator and its configuration, for programs that were written for it, on CPU and GPU.

With `use_tpu=False` the stock class is an Estimator that puts batch sizes into params and takes a
TPUEstimatorSpec. This one is that on every TensorFlow, and on the ranks of a HostOffloadStrategy.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext import estimator, run_config
from estimator_ext._tf_estimator import EstimatorSpec
from estimator_ext.errors import UnsupportedError
from estimator_ext.spec import stock_spec

__all__ = [
    "CrossShardOptimizer",
    "InputPipelineConfig",
    "RunConfig",
    "TPUConfig",
    "TPUEstimator",
    "TPUEstimatorSpec",
]

_Call = tuple[Callable[..., Any], Any]  # a function, and a list or dict of its tensors
_NO_TPU = (
    "use_tpu is True, and there is no TPU: this TPUEstimator trains on CPU, GPU and ranks. Pass "
    "use_tpu=False (programs often have a flag --use_tpu=false)"
)


class InputPipelineConfig(enum.IntEnum):
    """How a TPU's hosts would read data; here each rank calls input_fn once."""

    PER_SHARD_V1 = 1
    PER_HOST_V1 = 2
    PER_HOST_V2 = 3
    BROADCAST = 4
    SLICED = 5


@dataclass(frozen=True)
class TPUConfig:
    """Configuration of a TPU, which is accepted and has no effect without one.

    Args:
      iterations_per_loop: steps of a TPU's loop; hooks run after each step here.
      num_shards: number of TPU cores.
      num_cores_per_replica: of model parallelism.
      per_host_input_for_training: an InputPipelineConfig.
      tpu_job_name: name of the TPU's job.
      initial_infeed_sleep_secs: pause of the infeed.
      input_partition_dims: of model parallelism.
      eval_training_input_configuration: an InputPipelineConfig.
      experimental_host_call_every_n_steps: how often host_call runs, in steps.
      experimental_allow_per_host_v2_parallel_get_next: of the infeed.
      experimental_feed_hook: of the infeed.
    """

    iterations_per_loop: int = 2
    num_shards: int | None = None
    num_cores_per_replica: int | None = None
    per_host_input_for_training: Any = True
    tpu_job_name: str | None = None
    initial_infeed_sleep_secs: int | None = None
    input_partition_dims: Any = None
    eval_training_input_configuration: Any = InputPipelineConfig.PER_HOST_V1
    experimental_host_call_every_n_steps: int = 1
    experimental_allow_per_host_v2_parallel_get_next: bool = False
    experimental_feed_hook: Any = None


class RunConfig(run_config.RunConfig):
    """Configuration of a TPUEstimator; takes every argument of `estimator_ext.RunConfig`.

    Args:
      tpu_config: a TPUConfig.
      evaluation_master: address of a TPU for evaluation; not used.
      master: address of a TPU; not used.
      cluster: resolver of a TPU; wanted None.
      **fields: as for `estimator_ext.RunConfig`.

    Raises:
      UnsupportedError: cluster is given.
    """

    def __init__(
        self,
        tpu_config: TPUConfig | None = None,
        evaluation_master: str | None = None,
        master: str | None = None,
        cluster: Any = None,
        **fields: Any,
    ) -> None:
        super().__init__(**fields)
        if cluster is not None:
            raise UnsupportedError(_NO_TPU)
        del evaluation_master, master
        self._tpu_config = tpu_config or TPUConfig()

    @property
    def tpu_config(self) -> TPUConfig:
        """The configuration of a TPU, as it was given."""
        return self._tpu_config


class TPUEstimatorSpec(EstimatorSpec):
    """What the model_fn of a TPUEstimator returns.

    Args:
      mode: a `tf.estimator.ModeKeys`.
      predictions: dict of tensors.
      loss: scalar tensor.
      train_op: operation of the step.
      eval_metrics: tuple (function, list or dict of tensors); the function returns what
        `EstimatorSpec.eval_metric_ops` holds.
      export_outputs: dict of outputs of a SavedModel.
      scaffold_fn: function without arguments that returns a `tf.compat.v1.train.Scaffold`.
      host_call: tuple (function, list or dict of tensors); what the function returns is run in
        each step, on each rank.
      training_hooks: hooks of training.
      evaluation_hooks: hooks of evaluation.
      prediction_hooks: hooks of prediction.

    Raises:
      ValueError: as for `tf.estimator.EstimatorSpec`.
    """

    eval_metrics: _Call | None
    scaffold_fn: Callable[[], Any] | None
    host_call: _Call | None

    def __new__(
        cls,
        mode: str,
        predictions: Any = None,
        loss: tf.Tensor | None = None,
        train_op: Any = None,
        eval_metrics: _Call | None = None,
        export_outputs: Mapping[str, Any] | None = None,
        scaffold_fn: Callable[[], Any] | None = None,
        host_call: _Call | None = None,
        training_hooks: Sequence[Any] | None = None,
        evaluation_hooks: Sequence[Any] | None = None,
        prediction_hooks: Sequence[Any] | None = None,
    ) -> TPUEstimatorSpec:
        """Calls the functions of metrics, scaffold and host call, in the graph of model_fn."""
        own = [] if host_call is None else [_HostCallHook(_call(host_call))]
        spec = super().__new__(
            cls,
            mode=mode,
            predictions=predictions,
            loss=loss,
            train_op=train_op,
            eval_metric_ops=None if eval_metrics is None else _call(eval_metrics),
            export_outputs=export_outputs,
            training_hooks=[*(training_hooks or ()), *own],
            scaffold=None if scaffold_fn is None else scaffold_fn(),
            evaluation_hooks=[*(evaluation_hooks or ()), *own],
            prediction_hooks=[*(prediction_hooks or ()), *own],
        )
        spec.eval_metrics, spec.scaffold_fn, spec.host_call = eval_metrics, scaffold_fn, host_call
        return spec

    def as_estimator_spec(self) -> EstimatorSpec:
        """Makes the spec of an Estimator.

        Returns:
          A `tf.estimator.EstimatorSpec`.
        """
        return stock_spec(self)


class TPUEstimator(estimator.Estimator):
    """An Estimator with the arguments of `tf.compat.v1.estimator.tpu.TPUEstimator`.

    Batch sizes are global, as for `estimator_ext.Estimator`, and in params["batch_size"].
    params["use_tpu"] is False.

    Args:
      model_fn: returns a TPUEstimatorSpec or an EstimatorSpec.
      model_dir: directory of checkpoints and summaries.
      config: a RunConfig.
      params: dict that model_fn and input_fn receive.
      use_tpu: wanted False.
      train_batch_size: number of examples of a step, of all workers together.
      eval_batch_size: number of examples of a batch in evaluation.
      predict_batch_size: number of examples of a batch in prediction.
      batch_axis: of a TPU's infeed; not used.
      eval_on_tpu: not used.
      export_to_tpu: not used.
      export_to_cpu: not used.
      warm_start_from: checkpoint or settings.
      embedding_config_spec: of a TPU's embeddings; wanted None.
      export_saved_model_api_version: not used.

    Raises:
      UnsupportedError: use_tpu is True, or embedding_config_spec is given.
      ValueError: as for `estimator_ext.Estimator`.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | None = None,
        config: Any = None,
        params: dict[str, Any] | None = None,
        use_tpu: bool = True,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
        batch_axis: Any = None,
        eval_on_tpu: bool = True,
        export_to_tpu: bool = True,
        export_to_cpu: bool = True,
        warm_start_from: Any = None,
        embedding_config_spec: Any = None,
        export_saved_model_api_version: Any = None,
    ) -> None:
        del batch_axis, eval_on_tpu, export_to_tpu, export_to_cpu, export_saved_model_api_version
        if use_tpu or embedding_config_spec is not None:
            raise UnsupportedError(_NO_TPU)
        super().__init__(
            model_fn,
            model_dir,
            config,
            {**(params or {}), "use_tpu": False},  # as the stock class tells model_fn
            warm_start_from,
            train_batch_size,
            eval_batch_size,
            predict_batch_size,
        )

    @property
    def _is_strict(self) -> bool:
        return False  # batch sizes are no sign of an accelerator here


class CrossShardOptimizer(tf.compat.v1.train.Optimizer):
    """An optimizer whose gradients are the mean of all ranks, as those of every optimizer are.

    Args:
      opt: the optimizer that is wrapped.
      reduction: wanted MEAN, the default.
      name: of the optimizer.
      group_assignment: wanted None.

    Raises:
      hostopt.ConfigError: another reduction than the mean, or one of groups.
    """

    def __init__(
        self,
        opt: tf.compat.v1.train.Optimizer,
        reduction: str = tf.compat.v1.losses.Reduction.MEAN,
        name: str = "CrossShardOptimizer",
        group_assignment: Any = None,
    ) -> None:
        if reduction != tf.compat.v1.losses.Reduction.MEAN or group_assignment is not None:
            raise hostopt.ConfigError(
                f"CrossShardOptimizer is to reduce by {reduction!r} in the groups "
                f"{group_assignment}, wanted 'weighted_mean' of all ranks. Leave both out"
            )
        super().__init__(False, name)
        self._opt = opt

    def compute_gradients(self, loss: Any, var_list: Any = None, **options: Any) -> Any:
        """As the wrapped optimizer does."""
        return self._opt.compute_gradients(loss, var_list=var_list, **options)

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: Any = None
    ) -> Any:
        """As the wrapped optimizer does."""
        return self._opt.apply_gradients(grads_and_vars, global_step, name)

    def get_slot(self, *arguments: Any, **options: Any) -> Any:
        """As the wrapped optimizer does."""
        return self._opt.get_slot(*arguments, **options)

    def get_slot_names(self) -> Any:
        """As the wrapped optimizer does."""
        return self._opt.get_slot_names()

    def variables(self) -> Any:
        """As the wrapped optimizer does."""
        return self._opt.variables()


class _HostCallHook(tf.compat.v1.train.SessionRunHook):
    """Runs what a host_call has built."""

    def __init__(self, fetches: Any) -> None:
        self._fetches = fetches

    def before_run(self, run_context: Any) -> Any:
        return tf.compat.v1.train.SessionRunArgs(self._fetches)


def _call(call: _Call) -> Any:
    function, tensors = call
    return function(**tensors) if isinstance(tensors, Mapping) else function(*tensors)
