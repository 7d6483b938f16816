"""Containers of a training job of SageMaker."""

from __future__ import annotations

import json
from collections.abc import Mapping

from hostopt.adapters.place import PORT, Place
from hostopt.errors import ConfigError


def find(environ: Mapping[str, str]) -> Place | None:
    """Returns the place of a container of a training job, or None. Each host has one process."""
    if "SM_HOSTS" not in environ:
        return None
    hosts, host = hosts_of(environ), environ.get("SM_CURRENT_HOST")
    if host is None or host not in hosts:
        text = environ["SM_HOSTS"]
        raise ConfigError(
            f"SM_HOSTS is {text!r} and SM_CURRENT_HOST is {host!r}, wanted a list of hosts and "
            "one of them. Correct them, or unset both"
        )
    addresses = tuple(f"{each}:{PORT}" for each in hosts)
    return Place("SageMaker", hosts.index(host), len(hosts), 1, addresses)


def hosts_of(environ: Mapping[str, str]) -> list[str]:
    """Returns the hosts of the training job, in the order of their names; empty if unknown."""
    try:
        return sorted(map(str, json.loads(environ.get("SM_HOSTS", "[]"))))
    except (ValueError, TypeError):
        return []
