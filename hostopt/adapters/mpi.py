"""Processes that ``mpirun`` or ``mpiexec`` has started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hostopt.adapters.place import Place, optional_number, rank_and_size
from hostopt.errors import ConfigError
from hostopt.process.error_report import VARIABLE as STARTED_BY_HOSTOPT

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")  # set for each process, by launchers
_PROXY = "hydra_pmi_proxy"  # has started all processes of a run on this machine


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
    """Returns a place from variables: rank and size, and both among those of this machine."""
    rank, size = rank_and_size(environ, *names[:2])
    local_rank, local_size = (optional_number(environ, name) for name in names[2:])
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
