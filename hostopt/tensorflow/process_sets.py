"""The process set of all ranks, and refusals of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hostopt import process_ring
from hostopt.errors import ConfigError

_REFUSAL = (
    "process sets are not supported: every collective is over all ranks. Leave process_set out, "
    "or start a separate training for each set"
)


class ProcessSet:
    """A set of ranks, as Horovod names it. The only one is `global_process_set`.

    Args:
      ranks_or_comm: must not be given.

    Raises:
      ConfigError: `ranks_or_comm` is given.
    """

    process_set_id = 0

    def __init__(self, ranks_or_comm: Any = None) -> None:
        if ranks_or_comm is not None:
            raise ConfigError(_REFUSAL)

    @property
    def ranks(self) -> Sequence[int]:
        """All ranks."""
        return list(range(self.size()))

    def size(self) -> int:
        """Returns the number of ranks."""
        return process_ring.current().size

    def rank(self) -> int:
        """Returns this rank."""
        return process_ring.current().rank

    def included(self) -> bool:
        """Returns True: this rank is part of the set."""
        process_ring.current()
        return True

    def __str__(self) -> str:
        return "ProcessSet(of all ranks)"


global_process_set = ProcessSet()


def add_process_set(process_set: Any) -> ProcessSet:
    """Refuses a further process set.

    Args:
      process_set: ranks, or a process set.

    Raises:
      ConfigError: always.
    """
    del process_set
    raise ConfigError(_REFUSAL)


def remove_process_set(process_set: Any) -> bool:
    """Refuses to remove a process set; see `add_process_set`."""
    del process_set
    raise ConfigError(_REFUSAL)


def refuse_process_set(process_set: Any) -> None:
    """Raises ConfigError if a process set is given, unless it is the one of all ranks."""
    if process_set is not None and not isinstance(process_set, ProcessSet):
        raise ConfigError(_REFUSAL)


def refuse_process_set_id(process_set_id: int) -> None:
    """Raises ConfigError unless a number is the ID of the process set of all ranks."""
    if process_set_id != ProcessSet.process_set_id:
        raise ConfigError(_REFUSAL)
