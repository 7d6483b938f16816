"""Tasks of a cluster, and the ring of those that reduce together."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hostopt.cluster import tf_config
from hostopt.cluster.tf_config import DATA, EVALUATOR, RING_JOBS
from hostopt.errors import ConfigError
from hostopt.options import shown
from hostopt.process import descriptors

LOCAL = "local"


@dataclass(frozen=True)
class Task:
    """A process of the cluster.

    Args:
      type: ``chief`` (or ``master``, its old name), ``worker``, ``evaluator`` or ``data``.
      index: index within its job, from 0.
      address: ``host:port``; empty for an evaluator that the cluster does not list.
    """

    type: str
    index: int
    address: str

    @property
    def name(self) -> str:
        """``type:index``, as in logs and errors."""
        return f"{self.type}:{self.index}"

    def __str__(self) -> str:
        return f"{self.name}, {self.address}" if self.address else self.name


@dataclass(frozen=True)
class Cluster:
    """The tasks of the ring, and the task of this process.

    Args:
      task: task of this process; None without a cluster (one process, no TF_CONFIG).
      ring: tasks that reduce together, in rank order: the chief or master, then the workers.
      evaluators: evaluators that the cluster lists. They are not part of the ring.
      data: data workers, which prepare the data of the ring and are not part of it.
    """

    task: Task | None
    ring: tuple[Task, ...]
    evaluators: tuple[Task, ...] = ()
    data: tuple[Task, ...] = ()

    @property
    def role(self) -> str:
        """The job of this process, such as ``chief``; ``local`` without a cluster."""
        return self.task.type if self.task else LOCAL

    @property
    def rank(self) -> int | None:
        """Rank of this process, 0..size-1; None for an evaluator or a data worker."""
        if self.task is None:
            return 0
        return self.ring.index(self.task) if self.task in self.ring else None

    @property
    def size(self) -> int:
        """Number of ranks in the ring."""
        return max(len(self.ring), 1)

    @property
    def local_ranks(self) -> list[int]:
        """Ranks whose addresses write their host as this one does; [0] without a cluster."""
        if self.task is None:
            return [0]
        hosts = [task.address.rpartition(":")[0] for task in self.ring]
        host = self.task.address.rpartition(":")[0]
        return [rank for rank, each in enumerate(hosts) if each == host]

    @property
    def is_chief(self) -> bool:
        """True on rank 0, the only one that writes checkpoints and summaries."""
        return self.rank == 0

    def describe(self, rank: int) -> str:
        """Returns text for logs and errors, such as ``rank 1 (worker:0, host1:2222)``."""
        return f"rank {rank} ({self.ring[rank]})"

    def attributes(self, rank: int, **more: Any) -> dict[str, Any]:
        """Returns the arguments of a `HostOptError` about a rank: it, its task, and `more`."""
        task = self.ring[rank]
        return {"rank": rank, "task": task.name, "address": task.address, **more}

    def evaluator_ring(self) -> Cluster:
        """Returns the cluster whose ring consists of the evaluators.

        Returns:
          A cluster in which rank i is ``evaluator:i``, with the same task.

        Raises:
          ConfigError: the cluster does not list this evaluator, another task has the same
            address, or the host of this task does not resolve.
        """
        task, listed = self.task, self.evaluators
        if task is None or task not in listed:
            raise ConfigError(
                f'TF_CONFIG key "evaluator" lists {len(listed)} addresses [{_join(listed)}], and '
                f"none of this task ({task or LOCAL}). Several evaluators connect to each other: "
                'list the addresses of all of them under "evaluator", for each of them'
            )
        addresses = [member.address for member in (*self.ring, *listed, *self.data)]
        if addresses.count(task.address) > 1:
            raise ConfigError(
                f'TF_CONFIG key "cluster" lists the address {task.address!r} of this task '
                f"({task.name}) more than once. Give every evaluator its own port"
            )
        _check_host(task)
        return Cluster(task, listed)

    @classmethod
    def local(cls) -> Cluster:
        """Returns a cluster of this process only."""
        return cls(task=None, ring=())

    @classmethod
    def from_tf_config(cls, environ: Mapping[str, str] | None = None) -> Cluster:
        """Reads the TF_CONFIG environment variable.

        Args:
          environ: environment variables by name; `os.environ` by default.

        Returns:
          The cluster; `Cluster.local()` if TF_CONFIG is unset or names no cluster.

        Raises:
          ConfigError: TF_CONFIG is malformed; the message quotes the key and says what to write.
        """
        config = tf_config.read_tf_config(os.environ if environ is None else environ)
        return cls.local() if config is None else cls.from_dict(*config)

    @classmethod
    def from_dict(cls, jobs: Any, task_type: Any, task_index: Any) -> Cluster:
        """Builds the cluster from its jobs and the task of this process.

        Args:
          jobs: ``{"chief": [address], "worker": [addresses]}``, and perhaps addresses of an
            "evaluator" and "data".
          task_type: job of this process.
          task_index: index within that job, from 0.

        Returns:
          The cluster.

        Raises:
          ConfigError: the jobs or the task cannot be used, or the host of this task does not
            resolve.
        """
        jobs = tf_config.check_jobs(jobs)
        job, index = tf_config.check_task(jobs, task_type, task_index)
        ring = tuple(each for name in RING_JOBS for each in _tasks(name, jobs))
        evaluators = tuple(_tasks(EVALUATOR, jobs))
        task = Task(job, index, "")  # most clusters do not list their evaluators
        if index < len(jobs.get(job, [])):
            task = _tasks(job, jobs)[index]
        if task.type != EVALUATOR:
            _check_host(task)
        return cls(task, ring, evaluators, tuple(_tasks(DATA, jobs)))

    @classmethod
    def from_resolver(cls, resolver: Any, environ: Mapping[str, str] | None = None) -> Cluster:
        """Reads a `tf.distribute.cluster_resolver.ClusterResolver`, or an object like it.

        Args:
          resolver: object with ``cluster_spec()``, whose result has ``as_dict()``, ``task_type``
            and ``task_id``; None for TF_CONFIG only.
          environ: environment variables by name; `os.environ` by default. Its TF_CONFIG must not
            name another cluster or task.

        Returns:
          The cluster.

        Raises:
          ConfigError: the resolver or TF_CONFIG cannot be used, or they contradict each other.
        """
        from_env = cls.from_tf_config(environ)
        if resolver is None:
            return from_env
        if not callable(getattr(resolver, "cluster_spec", None)):
            raise ConfigError(
                f"the cluster resolver is of type {type(resolver).__name__}, wanted a "
                "tf.distribute.cluster_resolver.ClusterResolver. Give one, or None for TF_CONFIG"
            )
        spec = resolver.cluster_spec()
        jobs = spec.as_dict() if spec else {}
        if not jobs:
            return from_env
        if resolver.task_type is None and from_env.task is not None:
            result = cls.from_dict(jobs, from_env.task.type, from_env.task.index)
        else:
            result = cls.from_dict(jobs, resolver.task_type, resolver.task_id)
        is_same = (result.ring, result.task) == (from_env.ring, from_env.task)
        if from_env.task is not None and not is_same:
            raise ConfigError(
                f"the cluster resolver names task {result.task} of ring "
                f"[{_join(result.ring)}], but TF_CONFIG names task {from_env.task} of ring "
                f"[{_join(from_env.ring)}]. Make them the same, or unset TF_CONFIG"
            )
        return result


def core_count(cluster: Cluster) -> int:
    """Returns how many cores of its host this rank may use, 1 or more."""
    share = (os.cpu_count() or 1) // max(len(cluster.local_ranks), 1)
    return max(1, min(share, len(os.sched_getaffinity(0))))  # launchers bind ranks to their share


def _tasks(job: str, jobs: Mapping[str, list[str]]) -> list[Task]:
    return [Task(job, index, address) for index, address in enumerate(jobs.get(job, []))]


def _join(tasks: tuple[Task, ...]) -> str:
    return "; ".join(map(str, tasks))


def _check_host(task: Task) -> None:
    """Checks that the host of this task resolves."""
    host = task.address.rpartition(":")[0].strip("[]")
    try:
        socket.getaddrinfo(host, None)
    except (OSError, ValueError) as error:
        descriptors.check(error)
        raise ConfigError(
            f"the host of this task ({task.name}, {shown(task.address)}) does not resolve: "
            f'{error}. Write an address of this machine in TF_CONFIG under "{task.type}"',
            task=task.name,
            address=task.address,
        ) from None
