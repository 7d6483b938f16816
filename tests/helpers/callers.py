"""Calls of strangers to the gRPC server of a rank, and bad frames of a peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from rings import Spawn

from hostopt.collectives.communicator import Communicator
from hostopt.errors import ProtocolError


def beside_a_ring(
    spawn: Spawn, act: Callable[[Communicator], Any], size: int = 2, **options: Any
) -> Any:
    """Returns what `act` returns on rank 1 of a ring, which must work before and after it."""

    def work(communicator: Communicator) -> Any:
        communicator.barrier()
        result = act(communicator) if communicator.rank == 1 else None
        assert communicator.all_reduce(np.ones(3))[0] == size
        return result

    return spawn(size, work, **options)[1]


def check_a_bad_frame(spawn: Spawn, send: Callable[[Communicator], None]) -> None:
    """Checks that a bad frame, which `send` sends from rank 1 to rank 0, aborts the ring."""

    def work(communicator: Communicator) -> ProtocolError:
        communicator.barrier()  # or rank 0 would receive the bad frame during the rendezvous
        if communicator.rank == 1:
            send(communicator)
        with pytest.raises(ProtocolError, match="frame") as caught:
            for _ in range(2):  # rank 1 may have what it needs for the first
                communicator.all_reduce(np.ones(3))
        return caught.value

    for error in spawn(2, work, checksum=True):
        assert error.rank == 1
        assert "rank 1 (worker:0, " in str(error)
        assert error.root_cause in str(error)


def call(address: str, method: str, *messages: bytes, **metadata: str) -> Any:
    """Calls a rank like a stranger, with metadata of the call; returns the error.

    Args:
      method: ``Stream``, which takes any number of messages, or one that takes one.
    """
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        path = f"/hostopt.Ring/{method}"
        given = {"metadata": tuple(metadata.items()), "timeout": 30}
        if method == "Stream":
            return channel.stream_unary(path).future(iter(messages), **given).exception()
        return channel.unary_unary(path).future(*messages, **given).exception()
