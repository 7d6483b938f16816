"""What the collectives of chunks promise, on one rank."""

from __future__ import annotations

import numpy as np

from hostopt.collectives.call import Array
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.collectives.ring_schedule import chunk_slices
from hostopt.collectives.wire_format import new_wire_format


def check_chunks(communicator: Communicator, local: Array, compression: str | None) -> None:
    """Checks that scattered sums have the bits of an all-reduce, and that they are gathered."""
    wire = new_wire_format(compression)  # it has a buffer, so each rank needs its own
    whole, parts = local.copy(), local.copy()
    calls = [communicator.signed_call(kind, "", local) for kind in ("whole", "chunks")]
    communicator.all_reduce_in_place(whole, ReduceOp.SUM, calls[0], wire)
    communicator.reduce_scatter_in_place(parts, calls[1], wire)
    own = chunk_slices(local.size, communicator.size)[communicator.rank]
    np.testing.assert_array_equal(parts[own], whole[own])
    gathered = np.full_like(parts, np.nan)
    gathered[own] = parts[own]
    communicator.all_gather_in_place(gathered)
    np.testing.assert_array_equal(gathered, whole)
