"""The place of a process among those that a launcher has started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hostopt.errors import ConfigError

PORT = 2222  # of processes that have an address of their own


@dataclass(frozen=True)
class Place:
    """The place of this process among those that a launcher has started together.

    Args:
      local_size: number of processes on this machine; None if unknown.
      addresses: ``host:port`` of each process, in the order of ranks. Empty if unknown; then the
        processes exchange them.
      rendezvous: where they exchange them: ``host:port`` of rank 0, or ``@`` and the name of a run
        whose processes are all on this machine. None if unknown.
      host: name by which the others reach this machine; None for the address by which it reaches
        rank 0.
      run_id: differs between runs that may use the same rendezvous; empty if unknown.
      local_rank: number of this process among those of this machine; None if unknown.
    """

    launcher: str
    rank: int
    size: int
    local_size: int | None = None
    addresses: tuple[str, ...] = ()
    rendezvous: str | None = None
    host: str | None = None
    run_id: str = ""
    local_rank: int | None = None


def number(environ: Mapping[str, str], name: str) -> int:
    """Returns the number in a variable."""
    text = environ.get(name)
    if text is None or not (text.isascii() and text.isdecimal()):
        found = "not set" if text is None else repr(text)
        raise ConfigError(
            f"the variable {name} is {found}, wanted a number from 0. Set it, or unset the other "
            "variables of this launcher"
        )
    return int(text)


def optional_number(environ: Mapping[str, str], name: str) -> int | None:
    """Returns the number in a variable; None if the variable is unset."""
    return number(environ, name) if name in environ else None


def rank_and_size(environ: Mapping[str, str], rank: str, size: str) -> tuple[int, int]:
    """Returns the rank of this process and the number of processes, from these variables."""
    found = number(environ, rank), number(environ, size)
    if found[0] >= found[1]:
        raise ConfigError(
            f"the variable {rank} is {found[0]} and {size} is {found[1]}, wanted a rank from 0 to "
            f"{size} - 1. Correct them, or unset the variables of this launcher"
        )
    return found
