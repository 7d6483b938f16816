"""Pods of an Indexed Job of Kubernetes, or of a JobSet with one."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from hostopt.adapters.place import PORT, Place, rank_and_size
from hostopt.cluster.tf_config import read_tf_config
from hostopt.errors import ConfigError
from hostopt.options import RENDEZVOUS, SIZE

INDEX = "JOB_COMPLETION_INDEX"


def find(environ: Mapping[str, str]) -> Place | None:
    """Returns the place of a pod of an Indexed Job, or None.

    A pod knows its index, but not the number of pods, so HOSTOPT_SIZE must be set. The pods have a
    service, whose name is the subdomain of their host names. They need it unless TF_CONFIG or
    HOSTOPT_RENDEZVOUS is set.
    """
    if INDEX not in environ or SIZE not in environ:
        return None
    rank, size = rank_and_size(environ, INDEX, SIZE)
    is_known = RENDEZVOUS in environ or read_tf_config(environ) is not None
    addresses = () if is_known else _addresses(rank, size)
    return Place("Kubernetes", rank, size, 1, addresses)


def _addresses(rank: int, size: int) -> tuple[str, ...]:
    host, dot, service = socket.getfqdn().partition(".")
    base, _, index = host.rpartition("-")
    if index != str(rank) or not dot:
        raise ConfigError(
            f"the pod with {INDEX}={rank} is called {host}{dot}{service}, wanted a name that "
            f"ends in -{rank} and the name of a service. Set `subdomain` of the pods to the name "
            "of a headless service"
        )
    return tuple(f"{base}-{i}.{service}:{PORT}" for i in range(size))
