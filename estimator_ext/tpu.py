"""TPUEstimator and its configuration on CPU and GPU, for programs that were written for TPUs.

With `use_tpu=False` the stock class is an Estimator that adds batch sizes to params and accepts a
TPUEstimatorSpec. This class does the same on every TensorFlow version, and on the ranks of a
HostOffloadStrategy.
"""

from __future__ import annotations

import enum
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tensorflow as tf

import hostopt
from estimator_ext._tf_estimator import EstimatorSpec, ExportOutput, WarmStartSettings
from estimator_ext._tf_estimator import RunConfig as StockRunConfig
from estimator_ext._tf_private import summary_writer_initializers
from estimator_ext.errors import UnsupportedError
from estimator_ext.estimator import estimator, run_config
from estimator_ext.spec import EvalMetrics, Hooks, Step, Tensors, stock_spec

__all__ = [
    "CrossShardOptimizer",
    "InputPipelineConfig",
    "RunConfig",
    "TPUConfig",
    "TPUEstimator",
    "TPUEstimatorSpec",
]

_T = TypeVar("_T")
_HostCall = tuple[Callable[..., object], Tensors]
_NO_TPU = (
    "use_tpu is True, but this TPUEstimator trains on CPU and GPU. Pass use_tpu=False (programs "
    "often have a flag --use_tpu=false)"
)


class InputPipelineConfig(enum.IntEnum):
    """Ways in which the hosts of a TPU read data. Here each rank calls input_fn once."""

    PER_SHARD_V1 = 1
    PER_HOST_V1 = 2
    PER_HOST_V2 = 3
    BROADCAST = 4
    SLICED = 5


@dataclass(frozen=True)
class TPUConfig:
    """Configuration of a TPU. It is accepted for compatibility and has no effect.

    Hooks run after each step, whatever `iterations_per_loop` is, and host calls run in each step.
    """

    iterations_per_loop: int = 2
    num_shards: int | None = None
    num_cores_per_replica: int | None = None
    per_host_input_for_training: bool | InputPipelineConfig = True
    tpu_job_name: str | None = None
    initial_infeed_sleep_secs: int | None = None
    input_partition_dims: Sequence[object] | None = None
    eval_training_input_configuration: InputPipelineConfig = InputPipelineConfig.PER_HOST_V1
    experimental_host_call_every_n_steps: int = 1
    experimental_allow_per_host_v2_parallel_get_next: bool = False
    experimental_feed_hook: type[tf.compat.v1.train.SessionRunHook] | None = None


class RunConfig(run_config.RunConfig):
    """Configuration of a TPUEstimator. `evaluation_master` and `master` are ignored.

    Args:
      tpu_config: a TPUConfig.
      cluster: resolver of a TPU; must be None.
      **fields: arguments of `estimator_ext.RunConfig`.

    Raises:
      UnsupportedError: `cluster` is not None.
    """

    tpu_config: TPUConfig = run_config.read_only("_tpu_config", "The TPUConfig that was passed.")

    def __init__(
        self,
        tpu_config: TPUConfig | None = None,
        evaluation_master: str | None = None,
        master: str | None = None,
        cluster: object = None,
        **fields: Any,
    ) -> None:
        super().__init__(**fields)
        if cluster is not None:
            raise UnsupportedError(_NO_TPU)
        self._tpu_config = tpu_config or TPUConfig()


class TPUEstimatorSpec(EstimatorSpec):
    """The result of the model_fn of a TPUEstimator.

    The other arguments are those of `tf.estimator.EstimatorSpec`.

    Args:
      eval_metrics: tuple (function, list or dict of tensors); the function returns
        `eval_metric_ops` of an EstimatorSpec.
      scaffold_fn: function without arguments that returns a `tf.compat.v1.train.Scaffold`.
      host_call: tuple (function, list or dict of tensors). The operations that the function
        returns run in each step, on each rank.

    Raises:
      ValueError: see `tf.estimator.EstimatorSpec`.
    """

    eval_metrics: EvalMetrics | None
    scaffold_fn: Callable[[], tf.compat.v1.train.Scaffold] | None
    host_call: _HostCall | None

    def __new__(
        cls,
        mode: str,
        predictions: dict[str, tf.Tensor] | None = None,
        loss: tf.Tensor | None = None,
        train_op: Step | None = None,
        eval_metrics: EvalMetrics | None = None,
        export_outputs: dict[str, ExportOutput] | None = None,
        scaffold_fn: Callable[[], tf.compat.v1.train.Scaffold] | None = None,
        host_call: _HostCall | None = None,
        training_hooks: Hooks | None = None,
        evaluation_hooks: Hooks | None = None,
        prediction_hooks: Hooks | None = None,
    ) -> TPUEstimatorSpec:
        """Calls the functions for metrics, scaffold and host call, in the graph of model_fn."""
        hooks = [] if host_call is None else [_HostCallHook(_call(host_call))]
        spec: TPUEstimatorSpec = super().__new__(
            cls,
            mode=mode,
            predictions=predictions,
            loss=loss,
            train_op=train_op,
            eval_metric_ops=None if eval_metrics is None else _call(eval_metrics),
            export_outputs=export_outputs,
            training_hooks=[*(training_hooks or ()), *hooks],
            scaffold=None if scaffold_fn is None else scaffold_fn(),
            evaluation_hooks=[*(evaluation_hooks or ()), *hooks],
            prediction_hooks=[*(prediction_hooks or ()), *hooks],
        )
        spec.eval_metrics, spec.scaffold_fn, spec.host_call = eval_metrics, scaffold_fn, host_call
        return spec

    def as_estimator_spec(self) -> EstimatorSpec:
        """Returns the equivalent `tf.estimator.EstimatorSpec`."""
        return stock_spec(self)


class TPUEstimator(estimator.Estimator):
    """An Estimator with the arguments of `tf.compat.v1.estimator.tpu.TPUEstimator`.

    Batch sizes are global, as for `estimator_ext.Estimator`, and passed in params["batch_size"].
    params["use_tpu"] is False. Arguments that only matter on a TPU are ignored: `batch_axis`,
    `eval_on_tpu`, `export_to_tpu`, `export_to_cpu`, `export_saved_model_api_version`.

    Args:
      model_fn: returns a TPUEstimatorSpec or an EstimatorSpec.
      params: dict for model_fn and input_fn.
      use_tpu: must be False.
      train_batch_size: number of examples of a step, over all ranks.
      eval_batch_size: number of examples of a batch in evaluation.
      predict_batch_size: number of examples of a batch in prediction.
      embedding_config_spec: embeddings on a TPU; must be None.

    Raises:
      UnsupportedError: use_tpu is True, or embedding_config_spec is not None.
      ValueError: see `estimator_ext.Estimator`.
    """

    def __init__(
        self,
        model_fn: estimator.ModelFn,
        model_dir: str | os.PathLike[str] | None = None,
        config: StockRunConfig | None = None,
        params: Mapping[str, object] | None = None,
        use_tpu: bool = True,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
        batch_axis: Sequence[int] | None = None,
        eval_on_tpu: bool = True,
        export_to_tpu: bool = True,
        export_to_cpu: bool = True,
        warm_start_from: str | WarmStartSettings | None = None,
        embedding_config_spec: object = None,
        export_saved_model_api_version: object = None,
    ) -> None:
        if use_tpu or embedding_config_spec is not None:
            raise UnsupportedError(_NO_TPU)
        super().__init__(
            model_fn,
            model_dir,
            config,
            {**(params or {}), "use_tpu": False},  # like the stock class
            warm_start_from,
            train_batch_size,
            eval_batch_size,
            predict_batch_size,
        )

    @property
    def _is_strict(self) -> bool:
        return False  # batch sizes do not imply an accelerator here


class CrossShardOptimizer(tf.compat.v1.train.Optimizer):
    """Wraps an optimizer. As with every optimizer, gradients are averaged over the ranks.

    Args:
      reduction: must be MEAN, the default.
      group_assignment: must be None.

    Raises:
      hostopt.ConfigError: the reduction is not the mean, or there are groups.
    """

    def __init__(
        self,
        opt: tf.compat.v1.train.Optimizer,
        reduction: str = tf.compat.v1.losses.Reduction.MEAN,
        name: str = "CrossShardOptimizer",
        group_assignment: object = None,
    ) -> None:
        if reduction != tf.compat.v1.losses.Reduction.MEAN or group_assignment is not None:
            raise hostopt.ConfigError(
                f"CrossShardOptimizer has reduction {reduction!r} and group_assignment "
                f"{group_assignment}, but only the mean over all ranks is supported. Remove both"
            )
        super().__init__(False, name)
        self._opt = opt


def _of_wrapped(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(tf.compat.v1.train.Optimizer, name))
    def call(self: CrossShardOptimizer, *arguments: Any, **options: Any) -> Any:
        return getattr(self._opt, name)(*arguments, **options)

    return call


for _name in ("compute_gradients", "apply_gradients", "get_slot", "get_slot_names", "variables"):
    setattr(CrossShardOptimizer, _name, _of_wrapped(_name))


class _HostCallHook(tf.compat.v1.train.SessionRunHook):
    """Runs the operations of a host_call in each step, and opens its summary writers."""

    def __init__(self, fetches: Any) -> None:
        self._fetches = fetches

    def begin(self) -> None:
        self._open = summary_writer_initializers()
        self._flush = [tf.raw_ops.FlushSummaryWriter(writer=op.inputs[0]) for op in self._open]

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self._open)

    def end(self, session: Any) -> None:
        session.run(self._flush)

    def before_run(self, run_context: Any) -> Any:
        return tf.compat.v1.train.SessionRunArgs(self._fetches)


def _call(call: tuple[Callable[..., _T], Tensors]) -> _T:
    function, tensors = call
    return function(**tensors) if isinstance(tensors, Mapping) else function(*tensors)
