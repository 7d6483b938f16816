"""Groups of ranks that share a host.

Two ranks share a host if they run on the same kernel, identified by its boot id, and see the same
/dev/shm. Host names and addresses prove neither.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hostopt.collectives import shared_file
from hostopt.process import descriptors

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Hosts:
    """Ranks grouped by host; each group in rank order."""

    groups: tuple[tuple[int, ...], ...]

    @property
    def leaders(self) -> tuple[int, ...]:
        """First rank of each host."""
        return tuple(group[0] for group in self.groups)

    @property
    def is_single(self) -> bool:
        """True if all ranks share one host."""
        return len(self.groups) == 1

    @property
    def are_even(self) -> bool:
        """True if all hosts have the same number of ranks, and each has them in a row."""
        ranks = [rank for group in self.groups for rank in group]
        return ranks == sorted(ranks) and len({len(group) for group in self.groups}) == 1

    def members(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that share a host with `rank`, including `rank`."""
        (group,) = [group for group in self.groups if rank in group]
        return group


def boot_id() -> str:
    """Returns the boot id of the kernel; "" if it has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError as error:
        descriptors.check(error)
        return ""


def local_host_id() -> str:
    """Returns an identifier of the memory that this process can share; "" if it can share none."""
    if platform.machine() not in ("x86_64", "AMD64"):  # `sequence_counters` needs ordered stores
        return ""
    kernel = boot_id()
    try:
        return kernel and f"{kernel} {os.stat(shared_file.DIRECTORY).st_dev}"
    except OSError as error:
        descriptors.check(error)
        return ""


def group_by_host(host_ids: Sequence[str]) -> Hosts:
    """Groups ranks by their `local_host_id`. A rank with "" is alone on its host."""
    groups: dict[str, list[int]] = {}
    for rank, host_id in enumerate(host_ids):
        groups.setdefault(host_id or f"rank {rank}", []).append(rank)
    return Hosts(tuple(tuple(group) for group in groups.values()))
