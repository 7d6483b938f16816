"""Processes that ``srun`` has started."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hostopt.adapters.place import Place, number, optional_number, rank_and_size

_FIRST_PORT, _PORTS = 20_000, 10_000  # below those that systems give to any program


def find(environ: Mapping[str, str]) -> Place | None:
    """Returns the place in a step of Slurm, or None.

    A batch script is not part of a step, and has no place.
    """
    if "SLURM_STEP_NUM_TASKS" not in environ or "SLURM_PROCID" not in environ:
        return None
    job, step = number(environ, "SLURM_JOB_ID"), number(environ, "SLURM_STEP_ID")
    nodes = number(environ, "SLURM_STEP_NUM_NODES")
    rank, size = rank_and_size(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    run_id = f"{job}.{step}.{environ.get('SLURM_RESTART_COUNT', 0)}"
    if nodes == 1:
        local_size, host = size, None
        rendezvous = f"@slurm-{run_id}"
    else:
        local_size, host = _tasks_here(environ), environ.get("SLURMD_NODENAME")
        port = _FIRST_PORT + (7 * job + step) % _PORTS
        rendezvous = f"{first_node(environ.get('SLURM_STEP_NODELIST', ''))}:{port}"
    local_rank = optional_number(environ, "SLURM_LOCALID")
    return Place("Slurm", rank, size, local_size, (), rendezvous, host, run_id, local_rank)


def first_node(nodes: str) -> str:
    """Returns the first node of a list of Slurm: ``n07`` for ``n[07-09,12],m1``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group() if first else "")


def _tasks_here(environ: Mapping[str, str]) -> int:
    """Returns the number of tasks of this node: 2 for node 0 to 2 of ``2(x3),1``."""
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    node = int(environ.get("SLURM_NODEID", 0))
    return counts[min(node, len(counts) - 1)]
