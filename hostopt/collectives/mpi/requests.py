"""Waits for requests of MPI, which makes progress only while it is called.

A wait polls the request, and between polls the error of the ring and the deadline. So a rank that
dies, freezes or never calls is found as on the ring, whatever MPI does about it.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.mpi import runtime
from hostopt.errors import HostOptError, PeerLostError
from hostopt.transport.base import Transport

# Time of polling without sleep: a rank that sleeps wakes up late, and then the others wait for it.
_SPIN_S, _SPIN_S_PER_BYTE = 2e-3, 5e-9
_POLLS = 16  # about 5 us, between offers of the core to other threads
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 200e-6
# Time in which the call of a rank arrives that has left since.
_GRACE_S, _GRACE_S_PER_BYTE = 1.0, 1e-8
_CAUSE_S = 2.0  # time in which the ring notices why MPI has failed


def wait(
    transport: Transport,
    call: CollectiveCall,
    request: Any,
    phase: str,
    *buffers: Array,
    have_all_called: bool = True,
) -> None:
    """Waits until a request has ended.

    If all ranks wait, each is reported to wait for the previous one. So the rank at the end of
    that chain is the one that has not called.

    Args:
      *buffers: memory that the request uses, kept if the wait fails.
      have_all_called: True if all ranks have made the call. Then one that has left the ring has
        ended its part, as MPI and the messages of the ring do not wait for each other.
    """
    mpi = runtime.load()
    nbytes = sum(each.nbytes for each in buffers)
    grace_s = math.inf if have_all_called else _GRACE_S + nbytes * _GRACE_S_PER_BYTE
    try:
        if not (_has_ended(request) or _spin(request, nbytes)):
            _poll(transport, call, request, phase, grace_s)
    except BaseException as error:
        runtime.keep(request, *buffers)
        failure = _cause(transport, call, error) if isinstance(error, mpi.Exception) else error
        transport.abort(failure)
        if failure is error:
            raise
        raise failure from error


def _has_ended(request: Any) -> bool:
    return any(request.Test() for _ in range(_POLLS))


def _spin(request: Any, nbytes: int) -> bool:
    end_s = time.monotonic() + _SPIN_S + nbytes * _SPIN_S_PER_BYTE
    while time.monotonic() < end_s:
        os.sched_yield()  # backward may need the core, or another rank if there are fewer cores
        if _has_ended(request):
            return True
    return False


def _poll(
    transport: Transport, call: CollectiveCall, request: Any, phase: str, grace_s: float
) -> None:
    previous = (transport.rank - 1) % transport.size
    pause_s = _SHORTEST_SLEEP_S
    name = call.in_phase(phase)
    with transport.mailbox.waiting(previous, call.tag(), name, grace_s) as check:
        while not request.Test():
            check()
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_SLEEP_S)


def _cause(transport: Transport, call: CollectiveCall, error: Exception) -> HostOptError:
    """Returns the error of the ring, which names the rank, or one with the words of MPI."""
    deadline_s = time.monotonic() + _CAUSE_S
    while transport.error is None and time.monotonic() < deadline_s:
        time.sleep(_LONGEST_SLEEP_S)
    return transport.error or PeerLostError(
        f"MPI has failed in {call.name or 'a collective'} at step {call.step}: {error}. Check the "
        "messages of MPI above, and the network between the ranks",
        **transport.cluster.attributes(transport.rank),
        step=call.step,
        bucket=call.bucket,
        root_cause=str(error),
    )
