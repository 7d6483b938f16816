"""RunConfig: the stock one, with the cluster as the strategy knows it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_estimator import RunConfig as _StockRunConfig
from estimator_ext.strategy import HostOffloadStrategy
from estimator_ext.uneven_data import MODES
from hostopt.options import MAX_COUNT, shown

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
      accumulate_steps: number of micro-batches whose mean gradient makes one step: one reduction,
        one update, one global_step.
      uneven_data: what happens where the data of a rank end before those of others. "join": it
        takes part with weight zero until all have ended, so that each example counts once;
        "stop": all ranks stop.
      iterations_per_loop: number of steps that one run of the session makes, in a loop of the
        graph; hooks, summaries and checkpoints come between loops.
      prefetch_depth: number of batches that the training's dataset prepares beforehand; None adds
        nothing to what input_fn does.
      strict: True applies the accelerator estimator's rules to input_fn, model_fn and params:
        input_fn returns a dataset, an evaluation has metrics, no field of an EstimatorSpec is
        missing, and 'input_fn' is a reserved key of params. They also apply with
        iterations_per_loop above 1, and if the Estimator is given a batch size.
      **fields: as for `tf.estimator.RunConfig`.

    Raises:
      hostopt.ConfigError: a timeline without a `HostOffloadStrategy`, or for one whose ranks have
        met without it; accumulate_steps without a `HostOffloadStrategy`; iterations_per_loop
        above 1 with several workers or with accumulate_steps.
      ValueError: accumulate_steps, uneven_data, iterations_per_loop, prefetch_depth or strict is
        none of the values that it may have.
    """

    def __init__(
        self,
        *args: Any,
        timeline: str | None = None,
        accumulate_steps: int = 1,
        uneven_data: str = "join",
        iterations_per_loop: int = 1,
        prefetch_depth: int | None = None,
        strict: bool = False,
        **fields: Any,
    ) -> None:
        super().__init__(*args, **fields)
        self._timeline = timeline
        self._accumulate_steps = whole_number("accumulate_steps", accumulate_steps)
        if not isinstance(uneven_data, str) or uneven_data not in MODES:
            raise ValueError(
                f"uneven_data is {shown(uneven_data)}, wanted one of {', '.join(MODES)}. Give one "
                "of them, or leave it out"
            )
        self._uneven_data = uneven_data
        self._iterations_per_loop = whole_number("iterations_per_loop", iterations_per_loop)
        self._prefetch_depth = prefetch_depth
        if prefetch_depth is not None:
            whole_number("prefetch_depth", prefetch_depth)
        if not isinstance(strict, bool):
            raise ValueError(f"strict is {shown(strict)}, wanted True or False. Give one of them")
        self._strict = strict
        self.check_loop()
        if isinstance(self.train_distribute, HostOffloadStrategy):
            if timeline is not None:
                self.train_distribute.record_timeline(timeline)
            adopt_cluster(self, self.train_distribute)
        elif timeline is not None:
            raise hostopt.ConfigError(
                f"timeline is {timeline!r}, wanted None: only a HostOffloadStrategy as "
                "train_distribute records one"
            )
        elif accumulate_steps > 1:
            raise hostopt.ConfigError(
                f"accumulate_steps is {accumulate_steps}, wanted 1: only a HostOffloadStrategy as "
                "train_distribute accumulates gradients"
            )

    @property
    def timeline(self) -> str | None:
        """File for a Chrome trace, as it was given."""
        return self._timeline

    @property
    def accumulate_steps(self) -> int:
        """Number of micro-batches of a step."""
        return self._accumulate_steps

    @property
    def uneven_data(self) -> str:
        """What happens where the data of a rank end before those of others."""
        return self._uneven_data

    @property
    def iterations_per_loop(self) -> int:
        """Number of steps of one run of the session."""
        return self._iterations_per_loop

    @property
    def prefetch_depth(self) -> int | None:
        """Number of batches that are prepared beforehand; None for none."""
        return self._prefetch_depth

    @property
    def strict(self) -> bool:
        """Whether the accelerator estimator's rules apply, whatever the other options are."""
        return self._strict

    def check_loop(self) -> None:
        """Make sure that `iterations_per_loop` goes together with the rest.

        Raises:
          hostopt.ConfigError: it does not.
        """
        if self._iterations_per_loop == 1:
            return
        found = f"iterations_per_loop is {self._iterations_per_loop}, wanted 1"
        strategy = self.train_distribute
        workers = strategy.num_replicas_in_sync if strategy else 1
        if workers > 1:
            raise hostopt.ConfigError(
                f"{found} with {workers} workers: they meet once in each run of the session. "
                "Leave it out, or train with one worker"
            )
        if self._accumulate_steps > 1:
            raise hostopt.ConfigError(
                f"{found} with accumulate_steps={self._accumulate_steps}: micro-batches are runs "
                "of the session by themselves. Leave one of the two out"
            )


def whole_number(name: str, value: Any, most: int = MAX_COUNT) -> int:
    """Refuse what is no whole number above 0.

    Args:
      name: of the option.
      value: as given by the user.
      most: the largest that will do.

    Returns:
      The value.

    Raises:
      ValueError: it is something else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise ValueError(
            f"{name} is {shown(value)}, wanted a whole number above 0 and up to {most}. Give one, "
            "or leave it out"
        )
    return value


def adopt_cluster(config: _StockRunConfig, strategy: HostOffloadStrategy) -> None:
    """Give a configuration the role that a strategy's cluster says, in place.

    Args:
      config: stock or extended; it no longer uses TensorFlow's distribute coordinator.
      strategy: knows the cluster and what a session needs.
    """
    if config._session_config is not None:  # else Estimator sets its default first
        config._session_config = strategy.update_config_proto(config._session_config)
        # the stock class names the jobs of a cluster with a "master" there
        config._session_config.ClearField("device_filters")
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
