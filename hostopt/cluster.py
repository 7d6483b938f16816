"""Who takes part: the one reader of TF_CONFIG and of cluster resolvers."""

from __future__ import annotations

import collections
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hostopt import descriptors
from hostopt.errors import ConfigError
from hostopt.options import shown

__all__: list[str] = []

CHIEF, WORKER, EVALUATOR, LOCAL = "chief", "worker", "evaluator", "local"
MASTER = "master"  # what old programs call the chief
_RING_JOBS = (CHIEF, MASTER, WORKER)
_PORT_DIGITS = 5
_EXAMPLE = (
    '{"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


@dataclass(frozen=True)
class Task:
    """One process of the cluster.

    Args:
      type: ``chief`` (or ``master``, its old name), ``worker`` or ``evaluator``.
      index: position within its job, from 0.
      address: ``host:port``, empty for an evaluator that the cluster does not list.
    """

    type: str
    index: int
    address: str

    @property
    def name(self) -> str:
        """``type:index``, as logs and errors show it."""
        return f"{self.type}:{self.index}"

    def __str__(self) -> str:
        return f"{self.name}, {self.address}" if self.address else self.name


@dataclass(frozen=True)
class Cluster:
    """The ring and this process's place in it.

    Args:
      task: this process; None where there is no cluster (one process, no TF_CONFIG).
      ring: the tasks that reduce together, in rank order: the chief or master, then the workers.
      evaluators: the evaluator tasks that the cluster lists; they are not in the ring.
    """

    task: Task | None
    ring: tuple[Task, ...]
    evaluators: tuple[Task, ...] = ()

    @property
    def role(self) -> str:
        """``chief``, ``master``, ``worker``, ``evaluator``, or ``local`` without a cluster."""
        return self.task.type if self.task else LOCAL

    @property
    def rank(self) -> int | None:
        """Place in the ring, 0..size-1; None for an evaluator."""
        if self.task is None:
            return 0
        return self.ring.index(self.task) if self.task in self.ring else None

    @property
    def size(self) -> int:
        """Number of ranks in the ring."""
        return max(len(self.ring), 1)

    @property
    def is_chief(self) -> bool:
        """True on rank 0, which alone writes checkpoints and summaries."""
        return self.rank == 0

    def evaluator_ring(self) -> Cluster:
        """The cluster of the evaluators alone, whose ring they are.

        Returns:
          A cluster with the evaluators as ring, rank i being ``evaluator:i``, and this task.

        Raises:
          ConfigError: the cluster does not list this evaluator, two tasks have one address, or
            this task's host does not resolve.
        """
        task, listed = self.task, self.evaluators
        if task is None or task not in listed:
            raise ConfigError(
                f'TF_CONFIG key "evaluator" lists {len(listed)} addresses [{_join(listed)}], and '
                f"none of this task ({task or LOCAL}). Several evaluators reach each other at "
                'their addresses: list those of all under "evaluator", on each of them'
            )
        addresses = [member.address for member in (*self.ring, *listed)]
        if addresses.count(task.address) > 1:
            raise ConfigError(
                f'TF_CONFIG key "cluster" lists the address {task.address!r} of this task '
                f"({task.name}) more than once. Give every evaluator a port of its own"
            )
        _check_resolves(task)
        return Cluster(task, listed)

    @classmethod
    def local(cls) -> Cluster:
        """A cluster of this process alone."""
        return cls(task=None, ring=())

    @classmethod
    def from_tf_config(cls, environ: Mapping[str, str] | None = None) -> Cluster:
        """Read the TF_CONFIG environment variable.

        Args:
          environ: where to look TF_CONFIG up; `os.environ` by default.

        Returns:
          The cluster; `Cluster.local()` where TF_CONFIG is unset or names no cluster.

        Raises:
          ConfigError: TF_CONFIG is malformed; the message quotes the key and says what to write.
        """
        config = _parse_tf_config(os.environ if environ is None else environ)
        if config.get("cluster", {}) == {}:
            _check_no_lonely_task(config.get("task", {}))
            return cls.local()
        task = config.get("task")
        if not isinstance(task, dict) or "type" not in task or "index" not in task:
            raise ConfigError(
                f'TF_CONFIG key "task" is {shown(task)}, wanted an object with "type" and '
                f'"index". If "cluster" is set in TF_CONFIG, task type and task index must be '
                f"set. Write for example {_EXAMPLE}"
            )
        return cls.from_dict(config["cluster"], task["type"], task["index"])

    @classmethod
    def from_dict(cls, jobs: Any, task_type: Any, task_index: Any) -> Cluster:
        """Build the cluster from its jobs and the task of this process.

        Args:
          jobs: ``{"chief": [address], "worker": [addresses], "evaluator": [addresses]}``.
          task_type: job of this process.
          task_index: position within that job, from 0.

        Returns:
          The cluster.

        Raises:
          ConfigError: the jobs or the task cannot be used, or this task's host does not resolve.
        """
        addresses = _check_jobs(jobs)
        ring = tuple(
            Task(job, index, address)
            for job in _RING_JOBS
            for index, address in enumerate(addresses.get(job, []))
        )
        evaluators = tuple(
            Task(EVALUATOR, index, address)
            for index, address in enumerate(addresses.get(EVALUATOR, []))
        )
        task = _find_task(ring + evaluators, addresses, task_type, task_index)
        if task.type != EVALUATOR:
            _check_resolves(task)
        return cls(task, ring, evaluators)

    @classmethod
    def from_resolver(cls, resolver: Any, environ: Mapping[str, str] | None = None) -> Cluster:
        """Read a `tf.distribute.cluster_resolver.ClusterResolver`, or anything shaped like one.

        Args:
          resolver: object with ``cluster_spec()`` (having ``as_dict()``), ``task_type`` and
            ``task_id``; None means TF_CONFIG alone.
          environ: where TF_CONFIG is looked up, `os.environ` by default; it must not name another
            cluster or task.

        Returns:
          The cluster.

        Raises:
          ConfigError: resolver or TF_CONFIG cannot be used, or they contradict each other.
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
            found = cls.from_dict(jobs, from_env.task.type, from_env.task.index)
        else:
            found = cls.from_dict(jobs, resolver.task_type, resolver.task_id)
        same = (found.ring, found.task) == (from_env.ring, from_env.task)
        if from_env.task is not None and not same:
            raise ConfigError(
                f"the cluster resolver names task {found.task} of ring "
                f"[{_join(found.ring)}], but TF_CONFIG names task {from_env.task} of ring "
                f"[{_join(from_env.ring)}]. Make them the same, or unset TF_CONFIG"
            )
        return found


def _join(tasks: tuple[Task, ...]) -> str:
    return "; ".join(map(str, tasks))


def _parse_tf_config(environ: Mapping[str, str]) -> dict[str, Any]:
    text = environ.get("TF_CONFIG", "").strip()
    if not text:
        return {}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"TF_CONFIG is not JSON ({error}): {shown(text)}. Write for example {_EXAMPLE}"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(
            f"TF_CONFIG is {shown(text)}, wanted a JSON object. Write for example {_EXAMPLE}"
        )
    return config


def _check_no_lonely_task(task: Any) -> None:
    if task not in ({}, {"type": WORKER, "index": 0}):
        raise ConfigError(
            f'TF_CONFIG has "task" {shown(task)} but no "cluster". Add the key "cluster" '
            f"with the addresses of all ranks, for example {_EXAMPLE}"
        )


def _check_jobs(jobs: Any) -> dict[str, list[str]]:
    if not isinstance(jobs, Mapping):
        raise ConfigError(
            f'TF_CONFIG key "cluster" is {shown(jobs)}, wanted an object. Write for example '
            f"{_EXAMPLE}"
        )
    checked: dict[str, list[str]] = {}
    for job, addresses in jobs.items():
        if job == "ps":
            raise ConfigError(
                'TF_CONFIG key "cluster" has a "ps" job. There are no parameter servers here: '
                'each rank holds the variables. Remove "ps" and start only chief and workers'
            )
        if job not in (*_RING_JOBS, EVALUATOR):
            raise ConfigError(
                f'TF_CONFIG key "cluster" has the unknown job {shown(job)}. Use "chief" (one), '
                '"worker" and "evaluator"'
            )
        checked[job] = _check_addresses(job, addresses)
    _check_one_chief(checked)
    ring = [address for job in _RING_JOBS for address in checked.get(job, [])]
    if not ring:
        raise ConfigError(
            'TF_CONFIG key "cluster" has neither "chief" nor "worker". Name at least one rank, '
            f"for example {_EXAMPLE}"
        )
    address, times = collections.Counter(ring).most_common(1)[0]
    if times > 1:
        raise ConfigError(
            f'TF_CONFIG key "cluster" lists the address {shown(address)} more than once. '
            "Give every rank a port of its own"
        )
    return checked


def _check_one_chief(jobs: dict[str, list[str]]) -> None:
    for job in (CHIEF, MASTER):
        if len(jobs.get(job, [])) > 1:
            raise ConfigError(
                f'TF_CONFIG key "{job}" lists {len(jobs[job])} addresses {shown(jobs[job])}. The '
                f'"cluster" in TF_CONFIG must have only one "{job}" node; list the others under '
                '"worker"'
            )
    if jobs.get(MASTER) == []:  # the stock RunConfig fails of it
        raise ConfigError(
            'TF_CONFIG key "master" lists no address. Give it one, or leave the key out'
        )
    if jobs.get(CHIEF) and jobs.get(MASTER):
        raise ConfigError(
            'TF_CONFIG key "cluster" has both "chief" and "master", which is its old name. If '
            "`master` node exists in `cluster`, job `chief` is not supported: name one of them"
        )


def _check_addresses(job: str, addresses: Any) -> list[str]:
    if not isinstance(addresses, (list, tuple)):
        raise ConfigError(
            f'TF_CONFIG key "{job}" is {shown(addresses)}, wanted a list of "host:port". '
            "List every task: sparse clusters are not supported"
        )
    for address in addresses:
        host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        is_number = port.isascii() and port.isdecimal() and len(port) <= _PORT_DIGITS
        if not (host and colon and is_number and 0 < int(port) < 65536):
            raise ConfigError(
                f'TF_CONFIG key "{job}" has the address {shown(address)}, wanted "host:port" with '
                "a port from 1 to 65535. Correct it"
            )
    return list(addresses)


def _find_task(
    tasks: tuple[Task, ...], addresses: dict[str, list[str]], task_type: Any, task_index: Any
) -> Task:
    if task_type not in (*_RING_JOBS, EVALUATOR):
        raise ConfigError(
            f'TF_CONFIG key "task": type {shown(task_type)} is not known. Use "chief", "worker" '
            'or "evaluator"'
        )
    try:
        index = int(str(task_index))  # neither 0.5 nor True
    except (TypeError, ValueError):
        raise ConfigError(
            f'TF_CONFIG key "index" is {shown(task_index)}, wanted a number from 0. Correct it'
        ) from None
    if index < 0:
        raise ConfigError(
            f'TF_CONFIG key "index" is {shown(index)}. Task index must be non-negative number.'
        )
    if task_type == EVALUATOR and addresses.get(MASTER):
        raise ConfigError(
            'TF_CONFIG key "task" names an evaluator, and the key "cluster" a "master", which '
            "evaluates by itself. If `master` node exists in `cluster`, task_type `evaluator` is "
            'not supported: name the master "chief"'
        )
    for task in tasks:
        if (task.type, task.index) == (task_type, index):
            return task
    if task_type == EVALUATOR:  # most clusters do not list their evaluators
        return Task(EVALUATOR, index, "")
    count = len(addresses.get(task_type, []))
    if not count:
        raise ConfigError(
            f'TF_CONFIG key "task": {task_type} is not a valid task_type in the cluster_spec: '
            f'the key "cluster" lists no "{task_type}"'
        )
    raise ConfigError(
        f'TF_CONFIG key "index": {shown(index)} is not a valid task_id for task_type {task_type} '
        f"in the cluster_spec, which lists {count}. Use 0 to {count - 1}"
    )


def _check_resolves(task: Task) -> None:
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
