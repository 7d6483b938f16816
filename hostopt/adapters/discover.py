"""Finds the launcher that has started this process, and writes TF_CONFIG for it."""

from __future__ import annotations

import functools
import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace

from hostopt.adapters import launchers, rendezvous
from hostopt.adapters.launchers import PORT, Place
from hostopt.cluster import tf_config
from hostopt.cluster.cluster import Cluster
from hostopt.cluster.tf_config import CHIEF, EVALUATOR, WORKER
from hostopt.errors import ConfigError
from hostopt.launch.environment import tf_config_of
from hostopt.options import LAUNCHER, PROCESS, RANK, RENDEZVOUS, SIZE, Options, shown
from hostopt.process.error_report import VARIABLE as STARTED_BY_HOSTOPT
from hostopt.transport.addresses import hold_port, is_loopback, port_of
from hostopt.transport.security import read_token

_log = logging.getLogger(__name__)

_Find = Callable[[Mapping[str, str]], "Place | None"]
# mpirun in a job of the others has started the ranks, so only its variables count there
_INNER: tuple[_Find, ...] = (launchers.find_open_mpi, launchers.find_mpich)
_OUTER: tuple[_Find, ...] = (
    launchers.find_slurm,
    launchers.find_kubernetes,
    launchers.find_sagemaker,
)

_held: list[socket.socket] = []  # keeps the port of this process


def find_place(environ: Mapping[str, str]) -> Place | None:
    """Returns the place that a launcher has given to this process.

    Returns None if no launcher is known, if HOSTOPT_LAUNCHER is "none", or if `hostopt run` or a
    process of the launcher has started this process.
    """
    own = str(os.getpid())
    if STARTED_BY_HOSTOPT in environ or environ.get(PROCESS, own) != own:
        return None
    if LAUNCHER in environ:
        if environ[LAUNCHER] != "none":
            raise ConfigError(
                f"{LAUNCHER} is {shown(environ[LAUNCHER])}, wanted 'none'. Correct it, or unset "
                "it to use the launcher that has started this process"
            )
        return None
    found = _found(_INNER, environ) or _found(_OUTER, environ)
    found = [*_found((launchers.find_by_hand,), environ), *found]
    found = [each for each in found if each.size > 1] or found[:1]
    for other in found[1:]:
        if (other.rank, other.size) != (found[0].rank, found[0].size):
            raise ConfigError(
                f"{found[0].launcher} says rank {found[0].rank} of {found[0].size}, "
                f"{other.launcher} says rank {other.rank} of {other.size}. Unset the variables of "
                "the one that has not started this process"
            )
    if not found:
        if tf_config.read_tf_config(environ) is None:
            _check_alone(environ)
        return None
    place = next((each for each in found if each.addresses or each.rendezvous), found[0])
    return _with_rendezvous(place, environ)


def _found(finders: tuple[_Find, ...], environ: Mapping[str, str]) -> list[Place]:
    places = [find(environ) for find in finders]
    return [place for place in places if place is not None]


def _check_alone(environ: Mapping[str, str]) -> None:
    """Raises ConfigError, or warns, if variables of other processes make no place."""
    if launchers.INDEX in environ and RENDEZVOUS not in environ:
        _warn_alone(environ[launchers.INDEX])
        return
    for name in (SIZE, RENDEZVOUS):
        if name in environ:
            raise ConfigError(
                f"{name} is set, but neither {RANK} nor a launcher gives the rank of this "
                f"process. Set {RANK} and {SIZE} as well, or unset {name}"
            )


@functools.cache  # logged once
def _warn_alone(index: str) -> None:
    _log.warning(
        "started as pod %s of an Indexed Job, but %s is not set: this process trains alone. Set "
        "%s to the number of pods to train together, or %s=none",
        *(index, SIZE, SIZE, LAUNCHER),
    )


def _with_rendezvous(place: Place, environ: Mapping[str, str]) -> Place:
    if RENDEZVOUS in environ:
        if not tf_config.is_address(environ[RENDEZVOUS]):
            raise ConfigError(
                f'{RENDEZVOUS} is {shown(environ[RENDEZVOUS])}, wanted "host:port" with a port '
                "from 1 to 65535. Set it to an address of rank 0's machine"
            )
        return replace(place, rendezvous=environ[RENDEZVOUS], addresses=())
    hosts = launchers.hosts_of(environ)
    if hosts and not (place.rendezvous or place.addresses):  # mpirun on hosts of SageMaker
        return replace(place, rendezvous=f"{hosts[0]}:{PORT}")
    return place


def set_tf_config(options: Options, evaluators: int = 0) -> Place | None:
    """Sets TF_CONFIG if a launcher other than `hostopt run` has started this process.

    If the addresses of the processes are unknown, they exchange them. Each then holds its port
    until it ends.

    Collective if such a launcher has started the processes: all of them must call it. The last
    `evaluators` processes evaluate. Returns the place of this process, or None without a launcher.
    """
    place = find_place(os.environ)
    if place is None or place.size == 1:
        return place
    os.environ[PROCESS] = str(os.getpid())
    if tf_config.read_tf_config(os.environ) is not None:
        _check_same(place, Cluster.from_tf_config())
        return place
    ranks = place.size - evaluators
    if ranks < 1:
        raise ConfigError(
            f"{place.launcher} has started {place.size} processes, {evaluators} of them "
            "evaluators, so there is no rank. Start more processes"
        )
    addresses = list(place.addresses) or _exchange(place, options)
    jobs = {CHIEF: addresses[:1], WORKER: addresses[1:ranks], EVALUATOR: addresses[ranks:]}
    tasks = [(job, index) for job, members in jobs.items() for index in range(len(members))]
    os.environ["TF_CONFIG"] = tf_config_of(jobs, tasks[place.rank])
    return place


def _exchange(place: Place, options: Options) -> list[str]:
    if place.rendezvous is None:
        raise ConfigError(
            f"{place.launcher} does not name the machine of rank 0 of {place.size}. Set "
            "HOSTOPT_RENDEZVOUS=host:port to an address of that machine with a free port, on all "
            "ranks"
        )
    is_unix = place.rendezvous.startswith("@")
    token = read_token(options)
    if not (is_unix or is_loopback(place.rendezvous) or token or options.insecure):
        raise ConfigError(
            f"the ranks exchange their addresses at {place.rendezvous}, which other machines can "
            "reach, but there is no token. Give all ranks the same token, in a token_file or in "
            "HOSTOPT_TOKEN, also if they have a tls_dir (see docs/security.md), or set "
            "insecure=True if nobody else can reach this address"
        )
    holder = hold_port("127.0.0.1" if is_unix else "0.0.0.0")
    holder.set_inheritable(True)  # `hostopt exec` becomes the command
    _held.append(holder)
    return rendezvous.exchange(place, port_of(holder), token, options.rendezvous_timeout_s)


def _check_same(place: Place, cluster: Cluster) -> None:
    """Raises ConfigError unless TF_CONFIG is about this process. It need not list evaluators."""
    assert cluster.task is not None
    if place.rank < cluster.size:
        is_same = cluster.rank == place.rank
    else:
        is_same = cluster.rank is None and cluster.task.index == place.rank - cluster.size
    if not is_same or cluster.size > place.size:
        name = cluster.task.name if cluster.rank is None else f"rank {cluster.rank}"
        raise ConfigError(
            f"TF_CONFIG names {name} of {cluster.size} ranks, but {place.launcher} has started "
            f"this process as {place.rank} of {place.size}. Unset TF_CONFIG, or give each process "
            "its own"
        )
