"""Starts tasks on the nodes of a cluster of Ray: `hostopt run --on ray`.

Each slot has a bundle of resources for the whole run. An attempt creates an actor on each bundle,
which holds a port of its node and runs the task. If a node dies, its slots get other nodes at the
next restart, or have no place until a node has room for them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hostopt.launch import ray_cluster
from hostopt.launch.engine import Place
from hostopt.launch.ray_actor import Job
from hostopt.launch.ray_cluster import CPU, Bundles, Resources
from hostopt.launch.ray_relay import RelayedSupervisor
from hostopt.launch.ray_reservation import RayPlace, RayReservation

_JOIN_S = 2.0  # for a relay, before the connection to Ray is closed


class RayEngine:
    """Starts tasks on the nodes of a cluster of Ray.

    Args:
      address: ``host:port`` of the cluster; "auto" finds the one of this machine or job.
      resources: what Ray reserves for each rank.
      timeout_s: longest time to wait for a place before fewer ranks start.
    """

    def __init__(
        self,
        address: str,
        resources: Resources,
        timeout_s: float,
    ) -> None:
        self._address = address
        self._resources = resources
        self._timeout_s = timeout_s
        self._ray: Any = None
        self._bundles: Bundles | None = None
        self._missing_s: dict[int, float] = {}
        self._numbers = itertools.count(1)  # of tasks
        self._started: list[RelayedSupervisor] = []
        has_token = {"HOSTOPT_TOKEN", "HOSTOPT_TOKEN_FILE"} & os.environ.keys()
        # for this run; the commands alone have it in their environment
        self._token = {} if has_token else {"HOSTOPT_TOKEN": secrets.token_hex(32)}

    @contextlib.contextmanager
    def open(self, size: int, evaluators: int, min_size: int) -> Iterator[None]:
        """Connects to the cluster and reserves the resources of all tasks.

        Raises:
          ConfigError: Ray is not installed, or the cluster cannot be reached.
          ResourceError: the cluster has too few resources.
        """
        with ray_cluster.connected(self._address) as self._ray:
            helper = {CPU: min(1.0, self._resources.get(CPU, 1.0))}  # an evaluator sees no GPU
            bundles = Bundles(self._ray, [self._resources] * size, [helper] * evaluators)
            try:
                bundles.reserve(self._timeout_s, may_be_fewer=min_size < size)
                self._bundles = bundles
                yield
            finally:
                bundles.close()
                for supervisor in self._started:
                    supervisor.join(_JOIN_S)

    @contextlib.contextmanager
    def reserve(self, slots: Sequence[int], least: int) -> Iterator[RayReservation]:
        """Creates an actor for each slot, which holds a port of its node."""
        assert self._bundles is not None
        reservation = RayReservation(
            self._ray, self._bundles, slots, least, self._timeout_s, self._missing_s
        )
        try:
            yield reservation
        finally:
            reservation.close()

    def start(
        self,
        place: Place,
        command: Sequence[str],
        task: tuple[str, int],
        settings: Mapping[str, str],
    ) -> tuple[RelayedSupervisor, socket.socket]:
        """Starts a task through the actor of its place."""
        assert isinstance(place, RayPlace)
        job = Job(
            next(self._numbers),
            tuple(command),
            task,
            {**settings, **self._token},
            dict(os.environ),
            os.getcwd(),
            place.threads,
        )
        supervisor = RelayedSupervisor(self._ray, place.actor, place.node, job, place.lost.set)
        self._started.append(supervisor)
        return supervisor, supervisor.lifeline
