"""Places of processes that mpirun, Slurm, Kubernetes, SageMaker or any launcher has started."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hostopt.cluster.tf_config import read_tf_config
from hostopt.errors import ConfigError
from hostopt.options import RANK, RENDEZVOUS, SIZE
from hostopt.process.error_report import VARIABLE as STARTED_BY_HOSTOPT

PORT = 2222  # of processes that have an address of their own
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")  # set for each process, by launchers
_PROXY = "hydra_pmi_proxy"  # has started all processes of a run on this machine
INDEX = "JOB_COMPLETION_INDEX"  # of a pod, which Kubernetes sets
_FIRST_PORT, _PORTS = 20_000, 10_000  # of Slurm, below those that systems give to any program


@dataclass(frozen=True)
class Place:
    """The place of this process among those that a launcher has started together."""

    launcher: str
    rank: int
    size: int
    local_size: int | None = None  # number of processes on this machine; None if unknown
    addresses: tuple[str, ...] = ()  # ``host:port`` by rank; empty if the processes exchange them
    # Where they exchange them: ``host:port`` of rank 0, or ``@`` and the name of a run whose
    # processes are all on this machine. None if unknown.
    rendezvous: str | None = None
    # Name by which others reach this machine; None for the address by which it reaches rank 0.
    host: str | None = None
    run_id: str = ""  # differs between runs that may use the same rendezvous; empty if unknown
    local_rank: int | None = None  # number among the processes of this machine; None if unknown


def find_open_mpi(environ: Mapping[str, str]) -> Place | None:
    """Returns the place in a run of Open MPI 4 or 5, or None."""
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    run = environ.get("PMIX_NAMESPACE", "")
    return _place("Open MPI", environ, names, run, run)


def find_mpich(environ: Mapping[str, str]) -> Place | None:
    """Returns the place in a run of MPICH, Intel MPI or another launcher with PMI, or None.

    Slurm sets PMI_RANK too, but not MPI_LOCALNRANKS.
    """
    is_slurm = "SLURM_PROCID" in environ and "MPI_LOCALNRANKS" not in environ
    if "PMI_RANK" not in environ or is_slurm:
        return None
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _place("MPICH", environ, names, _proxy(), "")


def is_started(environ: Mapping[str, str]) -> bool:
    """Returns True if a launcher of MPI, and not `hostopt run`, has started this process."""
    return STARTED_BY_HOSTOPT not in environ and any(name in environ for name in _RANKS)


def check_started(environ: Mapping[str, str]) -> None:
    """Checks that a launcher has started this process that MPI can reach the others through."""
    if not is_started(environ):
        by_hostopt = STARTED_BY_HOSTOPT in environ
        starter = "`hostopt run`" if by_hostopt else "no launcher of MPI"
        raise ConfigError(
            f"communication is 'mpi', but {starter} has started this process, so MPI cannot reach "
            "the other ranks. Start them with `mpirun -np N hostopt exec -- python main.py`, or "
            "use another communication"
        )


def _place(
    launcher: str, environ: Mapping[str, str], names: Sequence[str], run_here: str, run_id: str
) -> Place:
    """Returns a place from variables: rank and size, then local rank and local size."""
    rank, size = _rank_and_size(environ, *names[:2])
    local_rank, local_size = (_optional_number(environ, name) for name in names[2:])
    rendezvous = f"@{run_here}" if run_here and local_size == size else None
    return Place(launcher, rank, size, local_size, (), rendezvous, None, run_id, local_rank)


def _proxy() -> str:
    """Returns the process ID and the start time of the nearest proxy above, or an empty string."""
    pid = os.getpid()
    while pid > 1:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return ""
        name, _, rest = text.rpartition(")")
        fields = rest.split()  # from the third of proc(5) on: state, parent, ...
        if name.endswith(f"({_PROXY}"):
            return f"{pid}-{fields[19]}"
        pid = int(fields[1])
    return ""


def find_slurm(environ: Mapping[str, str]) -> Place | None:
    """Returns the place in a step of Slurm, or None.

    A batch script is not part of a step, and has no place.
    """
    if "SLURM_STEP_NUM_TASKS" not in environ or "SLURM_PROCID" not in environ:
        return None
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID")
    nodes = _number(environ, "SLURM_STEP_NUM_NODES")
    rank, size = _rank_and_size(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    run_id = f"{job}.{step}.{environ.get('SLURM_RESTART_COUNT', 0)}"
    if nodes == 1:
        local_size, host = size, None
        rendezvous = f"@slurm-{run_id}"
    else:
        local_size, host = _tasks_here(environ), environ.get("SLURMD_NODENAME")
        port = _FIRST_PORT + (7 * job + step) % _PORTS
        rendezvous = f"{first_node(environ.get('SLURM_STEP_NODELIST', ''))}:{port}"
    local_rank = _optional_number(environ, "SLURM_LOCALID")
    return Place("Slurm", rank, size, local_size, (), rendezvous, host, run_id, local_rank)


def first_node(nodes: str) -> str:
    """Returns the first node of a list of Slurm: ``n07`` for ``n[07-09,12],m1``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group() if first else "")


def _tasks_here(environ: Mapping[str, str]) -> int:
    """Returns the number of tasks of this node: 2 for node 0 to 2 of ``2(x3),1``."""
    name, counts = "SLURM_STEP_TASKS_PER_NODE", []
    for part in environ.get(name, "1").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ConfigError(
                f"the variable {name} is {environ[name]!r}, wanted numbers of tasks such as "
                "2(x3),1. Correct it, or unset the other variables of this launcher"
            )
        counts += [int(found[1])] * int(found[2] or 1)
    node = _optional_number(environ, "SLURM_NODEID") or 0
    return counts[min(node, len(counts) - 1)]


def find_kubernetes(environ: Mapping[str, str]) -> Place | None:
    """Returns the place of a pod of an Indexed Job, or None.

    A pod knows its index, but not the number of pods, so HOSTOPT_SIZE must be set.
    """
    if INDEX not in environ or SIZE not in environ:
        return None
    rank, size = _rank_and_size(environ, INDEX, SIZE)
    is_known = RENDEZVOUS in environ or read_tf_config(environ) is not None
    addresses = () if is_known else _pod_addresses(rank, size)
    return Place("Kubernetes", rank, size, 1, addresses)


def _pod_addresses(rank: int, size: int) -> tuple[str, ...]:
    host, dot, service = socket.getfqdn().partition(".")
    base, _, index = host.rpartition("-")
    if index != str(rank) or not dot:
        raise ConfigError(
            f"the pod with {INDEX}={rank} is called {host}{dot}{service}, wanted a name that "
            f"ends in -{rank} and the name of a service. Set `subdomain` of the pods to the name "
            "of a headless service"
        )
    return tuple(f"{base}-{i}.{service}:{PORT}" for i in range(size))


def find_sagemaker(environ: Mapping[str, str]) -> Place | None:
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


def find_by_hand(environ: Mapping[str, str]) -> Place | None:
    """Returns the place that HOSTOPT_RANK and HOSTOPT_SIZE name, or None.

    The processes exchange addresses at HOSTOPT_RENDEZVOUS.
    """
    if RANK not in environ:
        return None
    return Place(RANK, *_rank_and_size(environ, RANK, SIZE))


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None or not (text.isascii() and text.isdecimal()):
        found = "not set" if text is None else repr(text)
        raise ConfigError(
            f"the variable {name} is {found}, wanted a number from 0. Set it, or unset the other "
            "variables of this launcher"
        )
    return int(text)


def _optional_number(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name) if name in environ else None


def _rank_and_size(environ: Mapping[str, str], rank: str, size: str) -> tuple[int, int]:
    found = _number(environ, rank), _number(environ, size)
    if found[0] >= found[1]:
        raise ConfigError(
            f"the variable {rank} is {found[0]} and {size} is {found[1]}, wanted a rank from 0 to "
            f"{size} - 1. Correct them, or unset the variables of this launcher"
        )
    return found
