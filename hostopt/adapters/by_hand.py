"""Processes that a launcher unknown to hostopt has started, with variables of hostopt."""

from __future__ import annotations

from collections.abc import Mapping

from hostopt.adapters.place import Place, rank_and_size
from hostopt.options import RANK, SIZE


def find(environ: Mapping[str, str]) -> Place | None:
    """Returns the place that HOSTOPT_RANK and HOSTOPT_SIZE name, or None.

    The processes exchange addresses at HOSTOPT_RENDEZVOUS.
    """
    if RANK not in environ:
        return None
    return Place("HOSTOPT_RANK", *rank_and_size(environ, RANK, SIZE))
