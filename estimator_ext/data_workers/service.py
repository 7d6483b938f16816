"""The training dataset of the ranks, prepared by data workers: RunConfig(data_service=...)."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext._tf_private import options_in_graph
from estimator_ext.data_workers.worker import bypass_proxies, check_reach, wait_for_start
from estimator_ext.errors import UnsupportedError
from estimator_ext.options import options_of
from estimator_ext.pipelines.divided_pipeline import (
    INSTEAD,
    check_dataset,
    divisible,
    transformations_of,
)
from estimator_ext.strategy.strategy import HostOffloadStrategy
from hostopt.tensorflow.background import HOST_DEVICE
from hostopt.transport.addresses import greets

_log = tf.get_logger()

DISTRIBUTED, OFF = "distributed_epoch", "off"
# "dynamic" is the newer name of TensorFlow for the same
MODES = (DISTRIBUTED, "dynamic", OFF)
# Batches that a rank holds ready. With more, the first rank to start would take too many.
_PREFETCHED = 2
_EVERY_S = 1.0
_ANSWER_S = 1.0
# For a rank to end once its session is closed. One that needs longer is stuck in TensorFlow, which
# cannot cancel the initialization of such an iterator.
_END_S = 10.0
_EXIT_S = 5.0  # for the functions that a program calls at its end


def mode_of(config: Any, cluster: hostopt.Cluster) -> str:
    """Returns how the training data are prepared: "distributed_epoch" or "off"."""
    mode = options_of(config).data_service
    if mode not in (None, OFF) and not cluster.data:
        raise hostopt.ConfigError(
            f"RunConfig.data_service is {mode!r}, and there are no data workers. Start the "
            "training with `hostopt run --data-workers K`, or leave data_service out"
        )
    return DISTRIBUTED if cluster.data and mode != OFF else OFF


@contextlib.contextmanager
def data_service(strategy: HostOffloadStrategy, config: Any) -> Iterator[DataWatch | None]:
    """Scope in which data workers are watched; yields None if there are none. Collective."""
    mode = mode_of(config, strategy.cluster)
    if strategy.cluster.data:
        strategy.communicator.check_same({"RunConfig.data_service": mode}, "the data workers")
    if mode == OFF:
        yield None
        return
    check_reach(strategy.cluster, strategy.options)
    bypass_proxies(strategy.cluster)
    with DataWatch(strategy.communicator, strategy.cluster.data, strategy.options) as watch:
        yield watch


def prepared(
    data: Any, strategy: HostOffloadStrategy, config: Any, watch: DataWatch
) -> tf.data.Dataset:
    """Has the data workers prepare a dataset, of which one rank gets each element.

    Collective: all ranks must call it. The ranks must not have taken shards.
    """
    communicator, workers = strategy.communicator, strategy.cluster.data
    check_dataset(data, len(workers))
    communicator.check_same(
        {"element_spec": repr(data.element_spec), **transformations_of(data)},
        "the datasets of input_fn (data workers prepare the one of rank 0 for all ranks)",
    )
    watch.wait_for_all()
    service = f"grpc://{workers[0].address}"
    name = secrets.token_hex(8) if communicator.rank == 0 else ""
    if name:
        _register(data, service, name, strategy, config.session_config)
    # of this training and attempt only; the others wait until the dispatcher knows it
    names = communicator.all_gather_bytes(name.encode(), "the job of the data")
    name = names[0].decode()
    with tf.device(HOST_DEVICE):
        elements = tf.data.experimental.service.from_dataset_id(
            DISTRIBUTED,
            service,
            name,
            element_spec=data.element_spec,
            job_name=name,
            max_outstanding_requests=max(_PREFETCHED, len(workers)),
        )
        return elements.prefetch(options_of(config).prefetch_depth or _PREFETCHED)


def _register(
    data: tf.data.Dataset, service: str, name: str, strategy: HostOffloadStrategy, config: Any
) -> None:
    is_local = check_reach(strategy.cluster, strategy.options)
    with tf.device(HOST_DEVICE), options_in_graph():
        register = tf.data.experimental.service.register_dataset(
            service,
            divisible(data),
            # on one machine, elements are copied faster than they are compressed
            compression=None if is_local else "AUTO",
            dataset_id=name,
        )
    try:
        with tf.compat.v1.Session(config=config) as session:
            session.run(tf.compat.v1.tables_initializer())
            session.run(register)
    except tf.errors.OpError as error:
        raise UnsupportedError(
            f"the data workers cannot prepare the dataset of input_fn: {error.message}. {INSTEAD}"
        ) from error
    workers = strategy.cluster.data
    _log.info("%d data workers prepare the data (%s)", len(workers), DISTRIBUTED)


# -- the watch of the data workers, for which TensorFlow waits without a deadline ----------------


@dataclass(eq=False)
class DataWatch(tf.compat.v1.train.SessionRunHook):
    """Ends the training on all ranks once a data worker has been gone for too long.

    A thread asks each data worker for a sign of life once a second. If the ring is aborted, by
    this rank or another, it closes the session, which ends a step that waits for its input. A rank
    that does something else, such as saving, continues until its next step.
    """

    communicator: hostopt.Communicator
    tasks: Sequence[hostopt.Task]
    options: hostopt.Options

    def __post_init__(self) -> None:
        self._transport = self.communicator.transport
        self._started: Sequence[hostopt.Task] = ()  # all of them, once all have answered
        self._limit_s = self.options.rendezvous_timeout_s
        self._session: tf.compat.v1.Session | None = None
        self._may_wait = threading.Event()  # for data: in a step, and before the first session
        self._may_wait.set()
        self._silent_since_s: dict[hostopt.Task, float] = {}
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hostopt-data-watch", daemon=True)

    def __enter__(self) -> DataWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def wait_for_all(self) -> None:
        """Waits until all data workers have started; raises the error of a ring that aborts."""
        until_s = time.monotonic() + self._limit_s
        for task in self.tasks:
            wait_for_start(task, until_s, self._limit_s, self._raise_error_of_ring)
        self._started = self.tasks

    def _raise_error_of_ring(self) -> None:
        if self._transport.error is not None:
            raise self._transport.error

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Makes the thread close this session if the ring is aborted."""
        self._session = session
        self._may_wait.clear()

    def before_run(self, run_context: Any) -> None:
        """Notes that a step begins."""
        self._may_wait.set()

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Notes that a step has ended; hooks that save come later."""
        self._may_wait.clear()

    def _run(self) -> None:
        while self._transport.error is None and not self._has_ended.wait(_EVERY_S):
            for task in self._started:
                try:
                    self._look_at(task)
                except hostopt.HostOptError as error:  # no descriptor is left
                    self.communicator.abort(error)
        # other parts of the step may report the error first
        while not self._has_ended.wait(_EVERY_S):
            if self._may_wait.is_set():
                self._end_step()
                return

    def _end_step(self) -> None:
        if self._session is not None:  # closing blocks as long as the session is stuck
            threading.Thread(target=self._session.close, daemon=True).start()
        error = self._transport.error
        if not self._has_ended.wait(_END_S) and error is not None:
            # ends this process with an error, although its main thread is stuck
            last_resort = threading.Timer(_EXIT_S, os._exit, [error.exit_code])
            last_resort.daemon = True
            last_resort.start()
            sys.excepthook(type(error), error, error.__traceback__)

    def _look_at(self, task: hostopt.Task) -> None:
        now_s = time.monotonic()
        if greets(task.address, _ANSWER_S):
            if self._silent_since_s.pop(task, None) is not None:
                _log.info("data worker %s answers again", task)
            return
        if task not in self._silent_since_s:
            self._silent_since_s[task] = now_s
            _log.warning(
                "data worker %s does not answer. If it has restarted, elements that it had "
                "taken, and those in its shuffle buffers, are lost. The training waits for it for "
                "up to %g s",
                task,
                self._limit_s,
            )
        if now_s - self._silent_since_s[task] >= self._limit_s and self._transport.error is None:
            self.communicator.abort(
                hostopt.PeerLostError(
                    f"data worker {task} has not answered for {self._limit_s:g} s. Check its "
                    "output, or raise rendezvous_timeout_s if it needs longer to restart",
                    task=task.name,
                    address=task.address,
                )
            )
