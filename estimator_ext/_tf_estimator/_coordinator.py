"""What tensorflow_estimator needs of the module that TensorFlow 2.16 removed.

`tensorflow.python.distribute.estimator_training` joined Estimator to TensorFlow's distribute
coordinator, which ran MultiWorkerMirroredStrategy and the parameter servers of a strategy. Here a
RunConfig learns its cluster as before, and whatever would have gone to the coordinator ends with
an error that says what to use.
"""

from __future__ import annotations

from typing import Any, NoReturn

import tensorflow as tf

import hostopt

__all__: list[str] = []

_INDEPENDENT_WORKER = "independent_worker"


def init_run_config(config: Any, tf_config: dict[str, Any]) -> None:
    """Give a RunConfig the cluster and task that TF_CONFIG names, in place.

    Args:
      config: a `tf.estimator.RunConfig` under construction.
      tf_config: content of TF_CONFIG; empty without one.

    Raises:
      ValueError: a strategy is given twice.
    """
    _adopt_distribute_config(config)
    cluster = tf_config.get("cluster", {})
    if config._train_distribute and cluster and "master" not in cluster:
        config._init_distributed_setting_from_environment_var({})
        config._cluster_spec = tf.train.ClusterSpec(cluster)
        config._distribute_coordinator_mode = _INDEPENDENT_WORKER
    else:
        config._distribute_coordinator_mode = None
        config._init_distributed_setting_from_environment_var(tf_config)
        config._maybe_overwrite_session_config_for_distributed_training()


def _adopt_distribute_config(config: Any) -> None:
    """Take over the strategies of RunConfig(experimental_distribute=...)."""
    distribute = config._experimental_distribute
    for name in ("train_distribute", "eval_distribute"):
        strategy = getattr(distribute, name, None)
        if strategy is None:
            continue
        if getattr(config, f"_{name}"):
            raise ValueError(
                f"Either `{name}` or `experimental_distribute.{name}` can be set, not both."
            )
        setattr(config, f"_{name}", strategy)
    if getattr(distribute, "remote_cluster", None):
        _refuse(config._train_distribute)


def should_run_distribute_coordinator(config: Any) -> bool:
    """Say whether TensorFlow's coordinator would run this configuration.

    Args:
      config: a `tf.estimator.RunConfig`.

    Returns:
      True for a strategy that trains on several tasks through the coordinator.
    """
    mode = getattr(config, "_distribute_coordinator_mode", None)  # a RunConfig may never set it
    return bool(mode and config.cluster_spec)


def train_and_evaluate(estimator: Any, train_spec: Any, eval_spec: Any, executor: Any) -> None:
    """Refuse to train through the coordinator.

    Args:
      estimator: whose configuration asks for it.
      train_spec: not used.
      eval_spec: not used.
      executor: not used.

    Raises:
      hostopt.ConfigError: always.
    """
    del train_spec, eval_spec, executor
    _refuse(estimator.config.train_distribute)


def estimator_train(estimator: Any, function: Any, hooks: Any) -> None:
    """Refuse to train through the coordinator.

    Args:
      estimator: whose configuration asks for it.
      function: not used.
      hooks: not used.

    Raises:
      hostopt.ConfigError: always.
    """
    del function, hooks
    _refuse(estimator.config.train_distribute)


def estimator_evaluate(estimator: Any, function: Any, hooks: Any) -> None:
    """Refuse to evaluate through the coordinator.

    Args:
      estimator: whose configuration asks for it.
      function: not used.
      hooks: not used.

    Raises:
      hostopt.ConfigError: always.
    """
    del function, hooks
    _refuse(estimator.config.eval_distribute or estimator.config.train_distribute)


def _refuse(strategy: Any) -> NoReturn:
    raise hostopt.ConfigError(
        f"tf.estimator.Estimator cannot train with {type(strategy).__name__} on a cluster: "
        f"TensorFlow {tf.__version__} no longer has the distribute coordinator that it needs. Use "
        "estimator_ext.Estimator with estimator_ext.HostOffloadStrategy, or TensorFlow 2.15"
    )
