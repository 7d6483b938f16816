"""RunConfig: the stock configuration with the cluster of the strategy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_estimator import RunConfig as _StockRunConfig
from estimator_ext.data_workers.service import MODES as DATA_MODES
from estimator_ext.data_workers.service import OFF, mode_of
from estimator_ext.input.state import KINDS
from estimator_ext.options import TrainingOptions
from estimator_ext.reduction.uneven_data import MODES
from estimator_ext.strategy.strategy import HostOffloadStrategy
from hostopt.options import MAX_COUNT, shown


def read_only(path: str, doc: str) -> Any:
    """Returns a property that reads an attribute; its annotation is the type of the value."""
    return property(attrgetter(path), doc=doc)


class RunConfig(_StockRunConfig):
    """Configuration of an Estimator; takes every argument of `tf.estimator.RunConfig`.

    With a `HostOffloadStrategy` as train_distribute, the role of this process (is_chief,
    task_type, task_id, global_id_in_cluster, num_worker_replicas) comes from the cluster of the
    strategy. cluster_spec has only this task, so that TensorFlow starts no server on an address
    of the ring. The whole ring is `train_distribute.cluster`.

    Args:
      *args: positional arguments of `tf.estimator.RunConfig`.
      timeline: file name for Chrome traces; with "trace.json" rank 0 writes "trace.rank0.json",
        and so on. None records nothing. HOSTOPT_TIMELINE overrides it.
      accumulate_steps: number of micro-batches whose mean gradient makes one step: one reduction,
        one update, one global_step.
      uneven_data: behavior when the data of a rank end before those of others. "join": the rank
        takes part with weight zero until all data have ended, so that each example counts once.
        "stop": all ranks stop.
      resume_data: how a restarted process finds its position in the data. "state": the states of
        tf.data iterators are saved and restored. "skip": the batches are counted, and as many are
        read and dropped. The data must be the same in each process, as a deterministic Python
        generator yields them.
      iterations_per_loop: number of steps in one run of the session, in a loop of the graph.
        Hooks, summaries and checkpoints run between loops.
      prefetch_depth: number of batches that the training dataset prefetches; None adds no
        prefetching to the dataset of input_fn.
      strict: True applies the rules of accelerator estimators: input_fn returns a dataset, an
        evaluation has metrics, an EstimatorSpec has all fields of its mode, and 'input_fn' is a
        reserved key of params. The rules also apply with iterations_per_loop above 1, and if the
        Estimator has a batch size.
      data_service: "distributed_epoch" (or "dynamic", a newer name of it): data workers prepare
        the training data, and each element goes to one rank. "off": each rank prepares its data.
        None is "distributed_epoch" if the cluster has data workers.
      **fields: keyword arguments of `tf.estimator.RunConfig`.

    Raises:
      hostopt.ConfigError: timeline or accumulate_steps without a `HostOffloadStrategy`; a timeline
        for a strategy that has connected without it; iterations_per_loop above 1 with several
        workers or with accumulate_steps; a data_service without data workers, or with
        resume_data "skip".
      ValueError: accumulate_steps, uneven_data, resume_data, iterations_per_loop, prefetch_depth,
        strict or data_service is not one of its possible values.
    """

    timeline: str | os.PathLike[str] | None = read_only(
        "_options.timeline", "File name for Chrome traces, as given."
    )
    accumulate_steps: int = read_only("_options.accumulate_steps", "Micro-batches of a step.")
    uneven_data: str = read_only("_options.uneven_data", '"join" or "stop".')
    resume_data: str = read_only("_options.resume_data", '"state" or "skip".')
    iterations_per_loop: int = read_only("_options.iterations_per_loop", "Steps of a run.")
    prefetch_depth: int | None = read_only(
        "_options.prefetch_depth", "In batches; None adds none."
    )
    strict: bool = read_only("_options.strict", "True for the rules of accelerator estimators.")
    data_service: str | None = read_only(
        "_options.data_service", "Mode of the data workers, as given."
    )

    def __init__(
        self,
        *args: Any,
        timeline: str | os.PathLike[str] | None = None,
        accumulate_steps: int = 1,
        uneven_data: str = "join",
        resume_data: str = "state",
        iterations_per_loop: int = 1,
        prefetch_depth: int | None = None,
        strict: bool = False,
        data_service: str | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(*args, **fields)
        positive_integer("accumulate_steps", accumulate_steps)
        _one_of("uneven_data", uneven_data, MODES)
        _one_of("resume_data", resume_data, KINDS)
        positive_integer("iterations_per_loop", iterations_per_loop)
        if prefetch_depth is not None:
            positive_integer("prefetch_depth", prefetch_depth)
        if not isinstance(strict, bool):
            raise ValueError(f"strict is {shown(strict)}, wanted True or False. Give one of them")
        if data_service is not None:
            _one_of("data_service", data_service, DATA_MODES)
        self._options = TrainingOptions(
            timeline,
            accumulate_steps,
            uneven_data,
            resume_data,
            iterations_per_loop,
            prefetch_depth,
            strict,
            data_service,
        )
        self.check_loop()
        if isinstance(self.train_distribute, HostOffloadStrategy):
            if timeline is not None:
                self.train_distribute.record_timeline(timeline)
            adopt_cluster(self, self.train_distribute)
            mode = mode_of(self, self.train_distribute.cluster)
            if mode != OFF and resume_data == KINDS[1]:
                raise hostopt.ConfigError(
                    "resume_data is 'skip' in a cluster with data workers, which prepare the "
                    "batches in an order that differs each time. Leave it out, or set "
                    "data_service='off'"
                )
        else:
            self._check_without_ranks()

    def _check_without_ranks(self) -> None:
        strategy = "HostOffloadStrategy as train_distribute"
        for name, allowed, only in (
            ("data_service", (None, OFF), f"ranks of a {strategy} have data workers"),
            ("timeline", (None,), f"a {strategy} records one"),
            ("accumulate_steps", (1,), f"a {strategy} accumulates gradients"),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise hostopt.ConfigError(f"{name} is {value!r}, wanted {allowed[0]}: only {only}")

    def check_loop(self) -> None:
        """Checks `iterations_per_loop` against the other options."""
        if self.iterations_per_loop == 1:
            return
        text = f"iterations_per_loop is {self.iterations_per_loop}, wanted 1"
        strategy = self.train_distribute
        workers = number_of_workers(strategy)
        on_ranks = isinstance(strategy, HostOffloadStrategy)
        if workers > 1 or (on_ranks and strategy.local_steps.is_used):
            raise hostopt.ConfigError(
                f"{text} with {workers} workers: they communicate once in each run of the "
                "session. Leave it out, or train with one worker"
            )
        if self.accumulate_steps > 1:
            raise hostopt.ConfigError(
                f"{text} with accumulate_steps={self.accumulate_steps}: each micro-batch is a "
                "run of the session. Leave one of the two out"
            )


def number_of_workers(strategy: Any) -> int:
    """Returns the number of processes that train together."""
    if isinstance(strategy, HostOffloadStrategy):
        return strategy.cluster.size
    return strategy.num_replicas_in_sync if strategy else 1


def _one_of(name: str, value: Any, words: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in words:
        raise ValueError(
            f"{name} is {shown(value)}, wanted one of {', '.join(words)}. Give one of them, or "
            "leave it out"
        )


def positive_integer(name: str, value: Any, most: int = MAX_COUNT) -> int:
    """Checks that the value of an option is an integer from 1 to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise ValueError(
            f"{name} is {shown(value)}, wanted a whole number above 0 and up to {most}. Give one, "
            "or leave it out"
        )
    return value


def adopt_cluster(config: _StockRunConfig, strategy: HostOffloadStrategy) -> None:
    """Sets the role of this process in a configuration, from the cluster of a strategy.

    The configuration, stock or extended, no longer uses TensorFlow's distribute coordinator.
    """
    if config._session_config is not None:  # if None, Estimator sets a default first
        config._session_config = strategy.update_config_proto(config._session_config)
        # the stock class sets them for a cluster that has a "master"
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
