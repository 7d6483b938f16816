"""tf.contrib.learn: what runs an experiment with an estimator of tf.estimator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow.compat.v2 as tf

import hostopt
from estimator_ext import _tf_estimator
from estimator_ext._tf_estimator import estimator_v1


class ModeKeys(_tf_estimator.ModeKeys):
    """The modes of a model_fn, with the older name of the last one."""

    INFER = _tf_estimator.ModeKeys.PREDICT


class RunConfig(_tf_estimator.RunConfig):
    """A `tf.estimator.RunConfig` with the arguments of TensorFlow 1.

    `log_device_placement` and `gpu_memory_fraction` are for its session; `master`,
    `evaluation_master` and `num_cores` are ignored.
    """

    def __init__(self, master: str | None = None, **fields: Any) -> None:
        for ignored in ("evaluation_master", "num_cores"):
            fields.pop(ignored, None)
        session = tf.compat.v1.ConfigProto()
        session.log_device_placement = fields.pop("log_device_placement", False)
        fraction = fields.pop("gpu_memory_fraction", 1)
        session.gpu_options.per_process_gpu_memory_fraction = fraction
        if fields.get("session_config") is None and (
            fraction != 1 or session.log_device_placement
        ):
            fields["session_config"] = session
        super().__init__(**fields)


class Experiment:
    """An estimator with its data, and the schedules that `run` chooses from.

    Each new checkpoint is evaluated, whatever `local_eval_frequency`, `min_eval_frequency`,
    `train_steps_per_iteration` and `checkpoint_and_export` are. No rank waits for others to begin,
    whatever `delay_workers_by_global_step` is.
    The monitors are hooks, and the export strategies are exporters. There must be no eval_metrics.
    """

    def __init__(
        self,
        estimator: Any,
        train_input_fn: Callable[..., Any],
        eval_input_fn: Callable[..., Any],
        eval_metrics: object = None,
        train_steps: int | None = None,
        eval_steps: int | None = 100,
        train_monitors: Any = None,
        eval_hooks: Any = None,
        local_eval_frequency: int | None = None,
        eval_delay_secs: float = 120,
        continuous_eval_throttle_secs: float = 60,
        min_eval_frequency: int | None = None,
        delay_workers_by_global_step: bool = False,
        export_strategies: Any = None,
        train_steps_per_iteration: int | None = None,
        checkpoint_and_export: bool = False,
        saving_listeners: Any = None,
    ) -> None:
        if eval_metrics is not None:
            raise hostopt.ConfigError(
                "the program passes eval_metrics to tf.contrib.learn.Experiment, which needs an "
                "Estimator of tf.contrib. Let the model_fn return eval_metric_ops"
            )
        self.estimator, self.train_steps, self.eval_steps = estimator, train_steps, eval_steps
        self._train_spec = estimator_v1.TrainSpec(
            train_input_fn, train_steps, train_monitors, saving_listeners
        )
        self._eval_spec = estimator_v1.EvalSpec(
            eval_input_fn,
            eval_steps,
            hooks=eval_hooks,
            exporters=export_strategies,
            start_delay_secs=eval_delay_secs,
            throttle_secs=continuous_eval_throttle_secs,
        )

    def extend_train_hooks(self, additional_hooks: Any) -> None:
        """Adds hooks to the training."""
        hooks = (*self._train_spec.hooks, *additional_hooks)
        self._train_spec = self._train_spec._replace(hooks=hooks)

    def train(self, delay_secs: float | None = None) -> Any:
        """Trains up to `train_steps`; `delay_secs` has no effect."""
        spec = self._train_spec
        return self.estimator.train(
            spec.input_fn, spec.hooks, None, spec.max_steps, spec.saving_listeners
        )

    def evaluate(self, delay_secs: float | None = None) -> Any:
        """Evaluates the newest checkpoint; `delay_secs` has no effect."""
        spec = self._eval_spec
        return self.estimator.evaluate(spec.input_fn, spec.steps, spec.hooks, name="one_pass")

    def train_and_evaluate(self) -> Any:
        """Trains, and evaluates new checkpoints, as `tf.estimator.train_and_evaluate` does."""
        return estimator_v1.train_and_evaluate(self.estimator, self._train_spec, self._eval_spec)

    continuous_train_and_eval = local_run = train_and_evaluate


def run(
    experiment_fn: Callable[..., Experiment],
    output_dir: str | None = None,
    schedule: str | None = None,
    run_config: Any = None,
    hparams: Any = None,
) -> Any:
    """Runs an experiment.

    Args:
      experiment_fn: returns it for `run_config` and `hparams`, by position, or else for
        `output_dir`, by name, as in TensorFlow 1.
      schedule: name of a method of the experiment; None for `train_and_evaluate`.
    """
    if run_config is None:
        experiment = experiment_fn(output_dir=output_dir)
    else:
        experiment = experiment_fn(run_config, hparams)
    return getattr(experiment, schedule or "train_and_evaluate")()


def replace_monitors_with_hooks(monitors_or_hooks: Iterable[Any] | None, estimator: Any) -> Any:
    """Returns a list of the hooks."""
    return [*(monitors_or_hooks or ())]


# -- functions of learn.utils ----------------------------------------------------------------


def InputFnOps(features: Any, labels: Any, default_inputs: Any) -> Any:  # noqa: N802
    """Returns what a function for serving returns today."""
    return estimator_v1.export.ServingInputReceiver(features, default_inputs)


def make_export_strategy(
    serving_input_fn: Callable[[], Any],
    default_output_alternative_key: None = None,
    assets_extra: Any = None,
    as_text: bool = False,
    exports_to_keep: int = 5,
) -> Any:
    """Returns an exporter of each evaluated checkpoint to "export/Servo"."""
    return estimator_v1.LatestExporter(
        "Servo", serving_input_fn, assets_extra, as_text, exports_to_keep
    )


build_parsing_serving_input_fn = estimator_v1.export.build_parsing_serving_input_receiver_fn
build_default_serving_input_fn = estimator_v1.export.build_raw_serving_input_receiver_fn
