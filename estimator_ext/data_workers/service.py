"""The training dataset of the ranks, prepared by data workers: RunConfig(data_service=...)."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_private import options_in_graph
from estimator_ext.data_workers.served_pipeline import check_dataset, transformations_of
from estimator_ext.data_workers.watch import DataWatch
from estimator_ext.data_workers.worker import bypass_proxies, check_reach
from estimator_ext.errors import UnsupportedError
from estimator_ext.pipelines.divided_pipeline import INSTEAD, divisible, sources_of
from estimator_ext.strategy.strategy import HostOffloadStrategy
from hostopt.tensorflow.background import HOST_DEVICE

_log = tf.get_logger()

DISTRIBUTED, OFF = "distributed_epoch", "off"
# "dynamic" is the newer name of TensorFlow for the same
MODES = (DISTRIBUTED, "dynamic", OFF)
# Batches that a rank holds ready. With more, the first rank to start would take too many.
_PREFETCHED = 2


def mode_of(config: Any, cluster: hostopt.Cluster) -> str:
    """Returns how the training data are prepared.

    Returns:
      "distributed_epoch" or "off".

    Raises:
      hostopt.ConfigError: data workers are wanted, and the cluster has none.
    """
    mode = getattr(config, "data_service", None)
    if mode is None:
        return DISTRIBUTED if cluster.data else OFF
    if mode == OFF:
        return OFF
    if not cluster.data:
        raise hostopt.ConfigError(
            f"RunConfig.data_service is {mode!r}, and there are no data workers. Start the "
            "training with `hostopt run --data-workers K`, or leave data_service out"
        )
    return DISTRIBUTED


class DataService:
    """The data workers of a training, which share one job of all ranks.

    Args:
      strategy: strategy of the training.
    """

    def __init__(self, strategy: HostOffloadStrategy) -> None:
        self._communicator = strategy.communicator
        self._cluster = strategy.cluster
        self._is_local = check_reach(strategy.cluster, strategy.options)
        bypass_proxies(strategy.cluster)
        self.watch = DataWatch(self._communicator, self._cluster.data, strategy.options)

    def prepare(self, data: Any, config: Any) -> tf.data.Dataset:
        """Has the data workers prepare a dataset.

        Collective: all ranks must call it.

        Args:
          data: the value that input_fn returned.

        Returns:
          Dataset of the elements that this rank gets; of each element of `data`, one rank gets it.

        Raises:
          UnsupportedError: the data workers cannot prepare the data.
          hostopt.CollectiveMismatchError: the ranks have different data, as with a shard for each
            rank.
          hostopt.RendezvousTimeoutError: a data worker did not start in time.
        """
        check_dataset(data, len(self._cluster.data))
        self._communicator.check_same(
            {
                "element_spec": repr(data.element_spec),
                **sources_of(data),
                **transformations_of(data),
            },
            "the datasets of input_fn (data workers prepare the one of rank 0 for all ranks)",
        )
        self.watch.wait_for_all()
        name = secrets.token_hex(8) if self._communicator.rank == 0 else ""
        if name:
            self._register(data, name, config.session_config)
        # of this training and attempt only; the others wait until the dispatcher knows it
        names = self._communicator.all_gather_bytes(name.encode(), "the job of the data")
        name = names[0].decode()
        with tf.device(HOST_DEVICE):
            prepared = tf.data.experimental.service.from_dataset_id(
                DISTRIBUTED,
                self._service,
                name,
                element_spec=data.element_spec,
                job_name=name,
                max_outstanding_requests=max(_PREFETCHED, len(self._cluster.data)),
            )
            return prepared.prefetch(getattr(config, "prefetch_depth", None) or _PREFETCHED)

    @property
    def _service(self) -> str:
        return f"grpc://{self._cluster.data[0].address}"

    def _register(self, data: tf.data.Dataset, name: str, config: Any) -> None:
        """Sends the pipeline of rank 0 to the dispatcher."""
        with tf.device(HOST_DEVICE), options_in_graph():
            register = tf.data.experimental.service.register_dataset(
                self._service,
                divisible(data),
                # on one machine, elements are copied faster than they are compressed
                compression=None if self._is_local else "AUTO",
                dataset_id=name,
            )
        try:
            with tf.compat.v1.Session(config=config) as session:
                session.run(tf.compat.v1.tables_initializer())
                session.run(register)
        except tf.errors.OpError as error:
            raise UnsupportedError(
                f"the data workers cannot prepare the dataset of input_fn: {error.message}. "
                f"{INSTEAD}"
            ) from error
        _log.info("%d data workers prepare the data (%s)", len(self._cluster.data), DISTRIBUTED)


@contextlib.contextmanager
def data_service(strategy: HostOffloadStrategy, config: Any) -> Iterator[DataService | None]:
    """Scope of a training in which the data workers are watched.

    Collective: all ranks must enter it.

    Yields:
      The data workers; None if each rank prepares its data itself.
    """
    mode = mode_of(config, strategy.cluster)
    if strategy.cluster.data:
        strategy.communicator.check_same({"RunConfig.data_service": mode}, "the data workers")
    if mode == OFF:
        yield None
        return
    service = DataService(strategy)
    with service.watch:
        yield service
