"""Data connections of a running ring: bad frames abort it, strangers do not affect it."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import numpy as np
import pytest
from harness import is_gone
from rings import NewRing, Spawn

from hostopt.collectives.communicator import Communicator
from hostopt.errors import CollectiveTimeoutError, HostOptError, PeerLostError


def test_a_broken_data_connection_between_living_ranks_is_named(spawn_tcp: Spawn) -> None:
    def work(communicator: Communicator) -> HostOptError:
        communicator.barrier()
        if communicator.rank == 1:
            stream: Any = communicator.transport._streams.to(0)
            stream._socket._socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(PeerLostError) as caught:
            for _ in range(1000):
                communicator.all_reduce(np.ones(100_000))
        return caught.value

    for error in spawn_tcp(2, work):
        assert "broke" in str(error)
        assert "both are alive" in str(error)


def test_a_rank_that_reads_nothing_is_named(processes: NewRing) -> None:
    """Its process is stopped, so its buffers fill; pings find it after the collective has."""
    ring = processes(2)
    script = """
        import os, signal, sys
        import numpy as np
        import hostopt
        communicator = hostopt.connect()
        communicator.barrier()
        print("connected", flush=True)
        if communicator.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        communicator.all_reduce(np.ones(5_000_000))
    """
    started = ring.start_all(
        script, HOSTOPT_COMMUNICATION="grpc+tcp", HOSTOPT_COLLECTIVE_TIMEOUT_S="5"
    )
    started[0].expect("connected")
    assert started[0].exit_code() == CollectiveTimeoutError.exit_code, started[0].stderr
    assert ring.name(1) in started[0].stderr
    started[1].kill()
    assert started[1].exit_code() == -signal.SIGKILL


def test_a_forked_child_does_not_keep_the_data_connections_of_a_killed_rank(
    processes: NewRing,
) -> None:
    ring = processes(2)
    script = """
        import os, signal, sys, time
        import numpy as np
        import hostopt
        communicator = hostopt.connect()
        communicator.barrier()
        if communicator.rank == 1:
            child = os.fork()
            if not child:
                os.setsid()
                sys.stdin.read()
                os._exit(0)
            print(child, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            communicator.all_reduce(np.ones(1000))
    """
    started = ring.start_all(script, HOSTOPT_COMMUNICATION="grpc+tcp")
    child = int(started[1].line())
    try:
        assert started[0].exit_code() == PeerLostError.exit_code, started[0].stderr
        assert not is_gone(child)
    finally:
        os.kill(child, signal.SIGKILL)
    assert started[1].exit_code() == -signal.SIGKILL
