"""The environment variables and cores of a task."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hostopt.cluster.tf_config import DATA, EVALUATOR
from hostopt.versions import has_keras_3

_NVIDIA_GPU = ("0x10de", "0x03")  # vendor, and class of a display controller


def tf_config_of(cluster: Mapping[str, Sequence[str]], task: tuple[str, int]) -> str:
    """Returns the TF_CONFIG of one task, without the jobs that have no task."""
    job, index = task
    jobs = {name: addresses for name, addresses in cluster.items() if addresses}
    return json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})


def with_defaults(base: Mapping[str, str], job: str, size: int) -> dict[str, str]:
    """Returns environment variables of a task, with defaults that suit training.

    The cores that this process may use are shared by `size` ranks.
    """
    cores = len(os.sched_getaffinity(0))
    threads = {EVALUATOR: 1, DATA: cores}.get(job, max(1, cores // size))
    defaults = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as `shares_of_cores` expects
        "PYTHONHASHSEED": "0",  # sets have the same order on all ranks
        "PYTHONUNBUFFERED": "1",
        "TF_NUM_INTRAOP_THREADS": str(threads),
        # as without binding; with one thread, an operation that waits would stop all others
        "TF_NUM_INTEROP_THREADS": str(cores),
        "OMP_NUM_THREADS": str(threads),
    }
    if has_keras_3():
        defaults["TF_USE_LEGACY_KERAS"] = "1"  # Estimator's graphs need Keras 2
    environment = {**defaults, **base}
    if job in (EVALUATOR, DATA):
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def find_command(command: Sequence[str]) -> list[str]:
    """Returns a command that can be started; one that ends in ``.py`` with this Python."""
    program = command[0]
    if program.endswith(".py"):
        if not os.path.isfile(program):
            raise FileNotFoundError(f"no such script: {program!r}")
        return [sys.executable, *command]
    if shutil.which(program) is None:
        raise FileNotFoundError(f"no such command: {program!r}")
    return list(command)


def shares_of_cores(size: int, sysfs: Path = Path("/sys")) -> list[list[int]]:
    """Divides the cores among ranks, so that they do not displace each other.

    Each rank gets a share of those that this process may use, near its GPU. If there are fewer
    cores than ranks, each gets all of them.
    """
    cores = list(os.sched_getaffinity(0))
    if size > len(cores):
        return [cores] * size
    cores.sort(key=lambda core: _place(core, sysfs))
    ends = [rank * len(cores) // size for rank in range(size + 1)]
    shares = (cores[begin:end] for begin, end in zip(ends, ends[1:]))
    # the memory of a node and the bus to its GPUs are slower for cores of other nodes
    nodes = (_nodes_of_gpus(sysfs) + [0] * size)[:size]
    ranks = sorted(range(size), key=nodes.__getitem__)
    return [share for _, share in sorted(zip(ranks, shares))]


def _place(core: int, sysfs: Path) -> tuple[int, int, int, int]:
    """Returns a key that sorts hardware threads of a core, and cores of a NUMA node, together."""
    path = sysfs / f"devices/system/cpu/cpu{core}"
    node = min((int(each.name[len("node") :]) for each in path.glob("node[0-9]*")), default=0)
    try:
        socket_id = int((path / "topology/physical_package_id").read_text())
        return node, socket_id, int((path / "topology/core_id").read_text()), core
    except (OSError, ValueError):  # some containers and emulations of Linux do not show it
        return node, 0, 0, core


def _nodes_of_gpus(sysfs: Path) -> list[int]:
    """Returns the NUMA node of each NVIDIA GPU that CUDA shows, in the order of the bus."""
    nodes = []
    for device in sorted((sysfs / "bus/pci/devices").glob("*")):
        with contextlib.suppress(OSError, ValueError):  # a container may not show all
            kind = (device / "vendor").read_text()[:6], (device / "class").read_text()[:4]
            if kind == _NVIDIA_GPU:
                nodes.append(int((device / "numa_node").read_text()))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return nodes
    if "-" in visible:  # -1 for none, or GPU-8f and MIG-8f
        return []
    try:
        return [nodes[int(gpu)] for gpu in visible.split(",")]
    except (IndexError, ValueError):
        return []
