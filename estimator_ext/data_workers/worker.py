"""A data worker: a process that prepares the data of the ranks, with TensorFlow's tf.data service.

::

    rank 0 --- pipeline ---> data:0, dispatcher      (files or numbers of elements)
                                  |  splits
                  +---------------+---------------+
                  v                               v
              data:0, worker                  data:1, worker
                  |  elements                     |
                  +------> rank 0, rank 1 <-------+

The dispatcher listens at the address of data:0. The worker of data:0 listens at a port of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

import hostopt
from estimator_ext.session.preemption import GRACE_S
from estimator_ext.strategy.strategy import HostOffloadStrategy
from hostopt.cluster.tf_config import DATA
from hostopt.options import DATA_DIR, RING_ENDED
from hostopt.transport.addresses import (
    hold_port,
    host_and_port,
    is_loopback,
    listens,
    port_of,
    wait_for,
)
from hostopt.transport.server_sockets import confine

_log = tf.get_logger()

_NO_PROXY = "no_grpc_proxy"  # gRPC reads it before no_proxy
_POLL_S = 0.5
_HEARTBEAT_MS = 1000  # from a worker to the dispatcher, which may have restarted
_ASK_EVERY_S = 3.0  # if the ring has ended
_CONNECT_S = 1.0
# Without an answer of a chief that has answered before. A ring that is restarted answers again.
GONE_S = 30.0
_service = tf.data.experimental.service


def serve_if_data_worker(strategy: Any) -> None:
    """Prepares data for the ranks until they have ended, if this process is a data worker.

    A data worker then exits, and does not return: it has served all trainings of the program, and
    what follows them, such as `evaluate`, is for the ranks.
    """
    if not _is_data_worker(strategy):
        return
    cluster, options = strategy.cluster, strategy.options
    check_reach(cluster, options)
    bypass_proxies(cluster)
    ring_end = _RingEnd(cluster, options)
    if not ring_end.has_come():
        with ring_end.signals_wait(), _serving(cluster, options) as confined_ports:
            _log.info("%s prepares data until the ranks have ended", cluster.task)
            while not ring_end.has_come():
                time.sleep(_POLL_S)
                for port in confined_ports:  # a connection may have begun before it was confined
                    confine(port)
    _log.info("the ranks have ended: %s exits", cluster.task)
    sys.exit(0)


def check_is_no_data_worker(strategy: Any, call: str) -> None:
    """Checks that this process may evaluate, predict or export, as a data worker may not."""
    if _is_data_worker(strategy):
        raise hostopt.ConfigError(
            f"Estimator.{call} is called in {strategy.cluster.task}, which only prepares data for "
            "the ranks. Call it if strategy.cluster.is_chief, or use "
            "estimator_ext.train_and_evaluate"
        )


def _is_data_worker(strategy: Any) -> bool:
    return isinstance(strategy, HostOffloadStrategy) and strategy.cluster.role == DATA


def check_reach(cluster: hostopt.Cluster, options: hostopt.Options) -> bool:
    """Refuses data workers that others can reach; returns True if all are on this machine."""
    remote = [task for task in (*cluster.ring, *cluster.data) if not is_loopback(task.address)]
    if remote and not options.insecure:
        raise hostopt.ConfigError(
            f"data workers are used and {remote[0]} is not on a loopback address: TensorFlow's "
            "tf.data service knows neither token nor TLS, and runs any pipeline that it is sent. "
            "Run all on one machine, or set insecure=True if nobody else can reach these "
            "addresses, as in a private network or a VPN"
        )
    for task in cluster.data:
        if ":" in host_and_port(task.address)[0]:
            raise hostopt.ConfigError(
                f"{task} has an address of IPv6, and TensorFlow's tf.data service listens on IPv4 "
                "only. Give data workers addresses of IPv4"
            )
    return not remote


def bypass_proxies(cluster: hostopt.Cluster) -> None:
    """Makes TensorFlow's gRPC connect to the data workers without the proxy of the environment."""
    kept = os.environ.get(_NO_PROXY, os.environ.get("no_proxy", ""))
    hosts = [host_and_port(task.address)[0] for task in cluster.data]
    os.environ[_NO_PROXY] = ",".join(dict.fromkeys([*filter(None, kept.split(",")), *hosts]))


@contextlib.contextmanager
def _serving(cluster: hostopt.Cluster, options: hostopt.Options) -> Iterator[list[int]]:
    """Scope in which the servers of this task run; yields the ports that are confined."""
    task, dispatcher, limit_s = cluster.task, cluster.data[0], options.rendezvous_timeout_s
    assert task is not None
    directory = os.environ.get(DATA_DIR, "")
    host, port = task.address.rpartition(":")[0], host_and_port(task.address)[1]
    servers: list[Any] = []
    ports: list[int] = []
    held = contextlib.ExitStack()
    try:
        if task == dispatcher:
            config = _service.DispatcherConfig(
                port, work_dir=directory or None, fault_tolerant_mode=bool(directory)
            )
            servers.append(_start(_service.DispatchServer, config, cluster))
            ports += _confined(port, cluster, options)
            port = held.enter_context(_port_of_worker(directory))
        else:
            wait_for_start(dispatcher, time.monotonic() + limit_s, limit_s)
        config = _service.WorkerConfig(
            dispatcher.address,
            worker_address=f"{host}:{port}",
            port=port,
            heartbeat_interval_ms=_HEARTBEAT_MS,
            dispatcher_timeout_ms=int(1000 * limit_s),
        )
        servers.append(_start(_service.WorkerServer, config, cluster))
        ports += _confined(port, cluster, options)
        held.close()
        yield ports
    finally:
        held.close()
        # A server stops when it is deleted, which blocks the interpreter as long as another one is
        # frozen. So the arguments of a thread keep them until the process ends.
        forever = threading.Event()
        threading.Thread(target=lambda _: forever.wait(), args=[servers], daemon=True).start()


def _start(kind: Any, config: Any, cluster: hostopt.Cluster) -> Any:
    try:
        return kind(config)
    except (tf.errors.UnavailableError, tf.errors.DeadlineExceededError) as error:
        raise hostopt.PeerLostError(
            f"{cluster.task} cannot register with {cluster.data[0]}, which assigns the data: "
            f"{error.message}. Check its output"
        ) from error
    except tf.errors.OpError as error:
        raise hostopt.ConfigError(
            f"{cluster.task} cannot listen at port {config.port}: {error.message}. Choose another "
            'port for it under "data", or end the process that has it'
        ) from error


def _confined(port: int, cluster: hostopt.Cluster, options: hostopt.Options) -> list[int]:
    """Confines a server to this machine if all tasks are on it; returns its port if it is."""
    if not check_reach(cluster, options):
        return []
    try:
        confine(port)
    except hostopt.ConfigError as error:
        if not options.insecure:
            raise
        _log.warning("other machines can reach this data worker: %s", error)
        return []
    return [port]


@contextlib.contextmanager
def _port_of_worker(directory: str) -> Iterator[int]:
    """Reserves the port of the worker beside the dispatcher, the same after a restart."""
    path = Path(directory, "port-of-worker")
    if directory and path.exists():
        yield int(path.read_text())
        return
    with hold_port() as holder:
        port = port_of(holder)
        if directory:
            written = path.with_suffix(".new")
            written.write_text(str(port))
            written.replace(path)
        yield port


def wait_for_start(
    task: hostopt.Task, until_s: float, limit_s: float, check: Callable[[], None] = lambda: None
) -> None:
    """Waits for a data worker until `until_s` of `time.monotonic`; `check` may raise an error."""
    if not wait_for(task.address, until_s, check):
        raise hostopt.RendezvousTimeoutError(
            f"data worker {task} did not start within {limit_s:g} s. Check its output, or raise "
            "rendezvous_timeout_s if it needs longer to start",
            task=task.name,
            address=task.address,
        )


# -- the end of the ring -----------------------------------------------------------------------


class _RingEnd:
    """The end of the ring, as this process sees it, which is not a rank.

    `hostopt run` creates a file once all ranks have succeeded, and kills this process if the ring
    fails. Without the launcher, the ring has ended if the chief does not answer any more as it
    does to `hostopt status`.
    """

    def __init__(self, cluster: hostopt.Cluster, options: hostopt.Options) -> None:
        self._path = os.environ.get(RING_ENDED)  # the file; None without the launcher
        if self._path is None and cluster.size == 1:
            raise hostopt.ConfigError(
                f"{cluster.task} cannot notice the end of its only rank, {cluster.ring[0]}, which "
                "does not listen. Start both with `hostopt run -np 1 --data-workers 1`, or use "
                "two ranks"
            )
        self._chief = cluster.ring[0]
        self._options = options
        self._was_seen = False
        self._next_s = self._seen_s = time.monotonic()
        self._ends_s = float("inf")  # after a signal

    @contextlib.contextmanager
    def signals_wait(self) -> Iterator[None]:
        """Scope in which this process serves on after SIGTERM, until the ranks have ended.

        A service manager sends it to all processes, and the ranks need data for their last step.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGTERM, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _on_signal(self, signum: int, frame: Any) -> None:
        self._ends_s = min(self._ends_s, time.monotonic() + GRACE_S)
        self._next_s = 0.0

    def has_come(self) -> bool:
        if self._path is not None:
            return os.path.exists(self._path)
        now_s = time.monotonic()
        if now_s > self._ends_s:
            raise SystemExit(128 + signal.SIGTERM)
        if now_s < self._next_s:
            return False
        # a short training must not be missed
        self._next_s = now_s + (_ASK_EVERY_S if self._was_seen else 0.0)
        if self._answers():
            self._was_seen, self._seen_s = True, now_s
            return False
        silent_s = now_s - self._seen_s
        if self._ends_s < float("inf") and self._was_seen:
            raise SystemExit(128 + signal.SIGTERM)
        if self._was_seen and silent_s >= GONE_S:
            _log.info("%s has not answered for %.0f s: this process ends", self._chief, silent_s)
            return True
        limit_s = self._options.evaluator_timeout_s
        if not self._was_seen and silent_s >= limit_s:
            raise hostopt.RendezvousTimeoutError(
                f"{self._chief} has not appeared within {limit_s:g} s. Check its output, or raise "
                "evaluator_timeout_s if it needs longer to start",
                task=self._chief.name,
                address=self._chief.address,
            )
        return False

    def _answers(self) -> bool:
        from hostopt.transport.grpc.observer import observe  # it imports gRPC

        try:
            observe(self._chief.address, self._options)
        except hostopt.PeerLostError:
            return listens(self._chief.address, _CONNECT_S)  # it may be busy or stopped
        except hostopt.ProtocolError:
            if not self._was_seen:
                raise
            return False  # another program has its port now
        return True
