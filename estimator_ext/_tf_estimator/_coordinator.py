"""Replacement for `tensorflow.python.distribute.estimator_training`, removed in TensorFlow 2.16.

That module connected Estimator to TensorFlow's distribute coordinator, for
MultiWorkerMirroredStrategy and for parameter servers. This one reads the cluster of a RunConfig as
before. In place of starting the coordinator it raises an error that names the alternative.
"""

from __future__ import annotations

from typing import Any, NoReturn

import tensorflow as tf

from estimator_ext.errors import UnsupportedError


def init_run_config(config: Any, tf_config: dict[str, Any]) -> None:
    """Sets cluster and task of a RunConfig from the content of TF_CONFIG, in place."""
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
    cluster = tf_config.get("cluster", {})
    remote = getattr(distribute, "remote_cluster", None)
    if config._train_distribute and (remote or (cluster and "master" not in cluster)):
        config._init_distributed_setting_from_environment_var({})
        config._cluster_spec = remote or tf.train.ClusterSpec(cluster)
        config._distribute_coordinator_mode = "independent_worker"
    else:
        config._distribute_coordinator_mode = None
        config._init_distributed_setting_from_environment_var(tf_config)
        config._maybe_overwrite_session_config_for_distributed_training()


def should_run_distribute_coordinator(config: Any) -> bool:
    """Returns True if TensorFlow's coordinator would run this configuration."""
    if config.task_type == "evaluator" and config.task_id > 0:  # TensorFlow's text, extended
        raise ValueError(
            "For distributed training, there can only be one `evaluator` task (with task id 0).  "
            f"Given task id {config.task_id}. Use estimator_ext.train_and_evaluate, which takes "
            "several"
        )
    if config.train_distribute is None:
        _warn_of_lonely_workers(config.cluster_spec.as_dict())
    mode = getattr(config, "_distribute_coordinator_mode", None)  # a RunConfig may never set it
    return bool(mode and config.cluster_spec)


def _warn_of_lonely_workers(cluster: dict[str, Any]) -> None:
    workers = sum(len(cluster.get(job, ())) for job in ("chief", "master", "worker"))
    if workers > 1 and "ps" not in cluster:
        tf.get_logger().warning(
            "TF_CONFIG names several workers, but RunConfig has no train_distribute and there are "
            "no parameter servers: the workers would wait for variables that are not shared. Give "
            "estimator_ext.RunConfig a HostOffloadStrategy as train_distribute"
        )


def _refuse(estimator: Any, *arguments: Any) -> NoReturn:
    strategy = estimator.config.train_distribute or estimator.config.eval_distribute
    raise UnsupportedError(
        f"tf.estimator.Estimator cannot work with {type(strategy).__name__} on a cluster: "
        f"TensorFlow {tf.__version__} no longer connects Estimator to its distribute "
        "coordinator. Use estimator_ext.Estimator with estimator_ext.HostOffloadStrategy"
    )


train_and_evaluate = estimator_train = estimator_evaluate = _refuse
