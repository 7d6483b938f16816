"""Which ranks share a host.

Two ranks are on one host where they run under one kernel (its boot id) and see the same /dev/shm:
names and addresses tell nothing of either. The first rank of each host is its *leader*; leaders
reduce over gRPC what their hosts have reduced in memory.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hostopt import descriptors, shared_file

__all__: list[str] = []

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Hosts:
    """The ranks, grouped by host.

    Args:
      groups: ranks that share memory, in rank order; a group for each host.
    """

    groups: tuple[tuple[int, ...], ...]

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each host."""
        return tuple(group[0] for group in self.groups)

    def members(self, rank: int) -> tuple[int, ...]:
        """The ranks of the host of `rank`."""
        (group,) = [group for group in self.groups if rank in group]
        return group


def boot_id() -> str:
    """Name of the kernel that runs here since the host has booted; empty where it has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError as error:
        descriptors.check(error)
        return ""


def own_host_id() -> str:
    """Name of the memory that this process can share; empty where it can share none."""
    if platform.machine() not in ("x86_64", "AMD64"):  # see hostopt.lane on the order of stores
        return ""
    kernel = boot_id()
    try:
        return kernel and f"{kernel} {os.stat(shared_file.DIRECTORY).st_dev}"
    except OSError as error:
        descriptors.check(error)
        return ""


def group_by_host(host_ids: Sequence[str]) -> Hosts:
    """Group ranks by the names of their hosts.

    Args:
      host_ids: what `own_host_id` gave on each rank; a rank without one is a host of its own.

    Returns:
      The groups, in the order of their leaders.
    """
    groups: dict[str, list[int]] = {}
    for rank, host_id in enumerate(host_ids):
        groups.setdefault(host_id or f"rank {rank}", []).append(rank)
    return Hosts(tuple(tuple(group) for group in groups.values()))
