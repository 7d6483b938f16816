"""Trainings inside Ray Train: the workers of a trainer are the ranks."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hostopt.cluster.tf_config import CHIEF, WORKER
from hostopt.errors import ConfigError
from hostopt.launch.environment import tf_config_of
from hostopt.transport.addresses import hold_port, port_of
from hostopt.versions import has_keras_3

try:
    import ray
    from ray.train.backend import Backend, BackendConfig
except ImportError as error:
    raise ConfigError(
        f"hostopt.ray needs Ray Train, which cannot be imported: {error}. Run `pip install "
        "'hostopt[ray]' 'ray[train]'`"
    ) from error

__all__ = ["HostOffloadConfig"]

_held: list[socket.socket] = []  # keeps the port of this worker


@dataclass
class HostOffloadConfig(BackendConfig):
    """Makes the workers of a `DataParallelTrainer` the ranks of a ring.

    Each worker gets TF_CONFIG with its address and those of the others: worker 0 is the chief. If
    there is no token, one is made for the ring.
    """

    @property
    def backend_cls(self) -> type[Backend]:
        """The class that prepares the workers."""
        return _HostOffloadBackend


class _HostOffloadBackend(Backend):
    """Sets the environment variables of the workers, before the training starts on them."""

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        addresses = worker_group.execute(_hold_port)
        token = secrets.token_hex(32)
        ray.get(
            [
                worker_group.execute_single_async(index, _set_environment, addresses, index, token)
                for index in range(len(addresses))
            ]
        )


def _hold_port() -> str:
    """Holds a port of this worker's node until a server listens there, and returns its address."""
    host = ray.util.get_node_ip_address()
    _held[:] = [hold_port(host)]
    return f"{host}:{port_of(_held[0])}"


def _set_environment(addresses: Sequence[str], index: int, token: str) -> None:
    cluster = {CHIEF: addresses[:1], WORKER: addresses[1:]}
    task = (CHIEF, 0) if index == 0 else (WORKER, index - 1)
    os.environ["TF_CONFIG"] = tf_config_of(cluster, task)
    if has_keras_3():
        os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # Estimator's graphs need Keras 2
    if "HOSTOPT_TOKEN_FILE" not in os.environ:
        os.environ.setdefault("HOSTOPT_TOKEN", token)
