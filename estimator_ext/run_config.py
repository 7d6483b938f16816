"""RunConfig: the stock one, with the cluster as the strategy knows it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_estimator import RunConfig as _StockRunConfig
from estimator_ext.strategy import HostOffloadStrategy

__all__: list[str] = []


class RunConfig(_StockRunConfig):
    """Configuration of an Estimator; takes every argument of `tf.estimator.RunConfig`.

    With a `HostOffloadStrategy` as train_distribute the role of this process (is_chief,
    task_type, task_id, global_id_in_cluster, num_worker_replicas) comes from the strategy's
    cluster. cluster_spec shows this task alone, so that no TensorFlow server is started on an
    address that belongs to the ring; the whole ring is `train_distribute.cluster`.

    Args:
      *args: as for `tf.estimator.RunConfig`.
      timeline: file for a Chrome trace, such as "trace.json", which becomes "trace.rank0.json"
        and so on; None records nothing. HOSTOPT_TIMELINE overrides it.
      **fields: as for `tf.estimator.RunConfig`.

    Raises:
      hostopt.ConfigError: a timeline without a `HostOffloadStrategy`, or for one whose ranks have
        met without it.
    """

    def __init__(self, *args: Any, timeline: str | None = None, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._timeline = timeline
        if isinstance(self.train_distribute, HostOffloadStrategy):
            if timeline is not None:
                self.train_distribute.record_timeline(timeline)
            adopt_cluster(self, self.train_distribute)
        elif timeline is not None:
            raise hostopt.ConfigError(
                f"timeline is {timeline!r}, wanted None: only a HostOffloadStrategy as "
                "train_distribute records one"
            )

    @property
    def timeline(self) -> str | None:
        """File for a Chrome trace, as it was given."""
        return self._timeline


def adopt_cluster(config: _StockRunConfig, strategy: HostOffloadStrategy) -> None:
    """Give a configuration the role that a strategy's cluster says, in place.

    Args:
      config: stock or extended; it no longer uses TensorFlow's distribute coordinator.
      strategy: knows the cluster and what a session needs.
    """
    if config._session_config is not None:  # else Estimator sets its default first
        config._session_config = strategy.update_config_proto(config._session_config)
    config._distribute_coordinator_mode = None
    config._experimental_max_worker_delay_secs = 0
    cluster, task = strategy.cluster, strategy.cluster.task
    if task is None:
        return
    in_ring = cluster.rank is not None
    config._cluster_spec = tf.train.ClusterSpec({task.type: [task.address]} if in_ring else {})
    config._task_type = task.type
    config._task_id = task.index
    config._is_chief = cluster.is_chief
    config._global_id_in_cluster = cluster.rank
    config._num_worker_replicas = cluster.size if in_ring else 0
    config._num_ps_replicas = 0
    config._master = config._evaluation_master = ""
