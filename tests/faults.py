"""Faults that a rank suffers, put upon hostopt from outside: it has no hooks for tests.

A `FaultPlan` names the rank, the step, the point of the step and what happens there:

    before-meeting  before the ranks meet
    between-steps   in the program, before the step's first bucket
    before-send     before the first message of the step, in memory before the first mark
    mid-chunk       when some of the step's messages have been handed over
    after-reduce    when the first bucket of the step is reduced, and others are not
    after-training  when all steps are done, on all ranks
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from hostopt import hierarchy
from hostopt.communicator import Communicator
from hostopt.lane import Lane
from hostopt.shared_file import SharedFile
from hostopt.transport import grpc, grpc_parts

STUCK_S = 20  # longer than any test waits
_MESSAGES_BEFORE = {"before-send": 0, "mid-chunk": 1}


@dataclass(frozen=True)
class FaultPlan:
    """One fault.

    Args:
      rank: who suffers it.
      step: step of the communicator, from 0.
      point: where in the step; see the module.
      action: one of ACTIONS.
    """

    rank: int
    step: int
    point: str
    action: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FaultPlan:
        return cls(**json.loads(text))


def strike(point: str, rank: int | None, plan: FaultPlan | None) -> None:
    """Suffer the fault where it is one of this rank at this point, outside of steps.

    Args:
      point: "before-meeting" or "after-training".
      rank: this one.
      plan: what happens, and where.
    """
    if plan is not None and (plan.point, plan.rank) == (point, rank):
        ACTIONS[plan.action]()


def inject(communicator: Communicator, plan: FaultPlan | None) -> None:
    """Have the fault happen in this process, where it is the rank of the plan.

    Args:
      communicator: the one whose steps count.
      plan: what happens, and where.
    """
    if plan is not None and plan.rank == communicator.rank:
        if plan.point in _MESSAGES_BEFORE:
            _inject_among_messages(communicator, plan)
        else:
            _inject_around_reduction(communicator, plan)


def _inject_among_messages(communicator: Communicator, plan: FaultPlan) -> None:
    messages = []
    send, meet = communicator.transport.send, Lane._meet

    def count(channel: int, step: int) -> None:
        if (channel, step) == (communicator.channel, plan.step):
            messages.append(step)
            if len(messages) == _MESSAGES_BEFORE[plan.point] + 1:
                ACTIONS[plan.action]()

    async def count_and_send(peer: int, tag: Any, *message: Any) -> None:
        count(tag.channel, tag.step)
        await send(peer, tag, *message)

    def count_and_meet(lane: Lane, operation: Any, round_: int) -> None:
        count(operation.channel, operation.step)
        meet(lane, operation, round_)

    communicator.transport.send = count_and_send
    Lane._meet = count_and_meet  # in this process, which is the test's own


def _inject_around_reduction(communicator: Communicator, plan: FaultPlan) -> None:
    reduce = communicator.all_reduce_in_place

    def reduce_with_fault(flat: Any, op: Any, operation: Any, *rest: Any) -> None:
        here = (operation.step, operation.bucket) == (plan.step, 0)
        if here and plan.point == "between-steps":
            ACTIONS[plan.action]()
        reduce(flat, op, operation, *rest)
        if here and plan.point == "after-reduce":
            ACTIONS[plan.action]()

    communicator.all_reduce_in_place = reduce_with_fault


def send_again(communicator: Communicator, when: str) -> None:
    """Have each frame to the next rank written once more, below all that could prevent it.

    Args:
      communicator: the rank that does so.
      when: ``at-once``, or ``later``: when 60 more have been written.
    """
    stream = communicator.transport._streams[(communicator.rank + 1) % communicator.size]
    write, written = stream._call.write, []

    async def write_again(message: bytes) -> None:
        await write(message)
        if message != grpc_parts.END_OF_STREAM:
            written.append(message)
        if len(written) > {"at-once": 0, "later": 60}[when]:
            await write(written.pop(0))

    stream._call.write = write_again


def set_ping_times(seconds: float) -> None:
    """Ask silent peers of this process sooner than after the default times, and wait as long."""
    grpc_parts.KEEPALIVE_S = grpc_parts.PING_TIMEOUT_S = seconds


def share_memory_in(directory: str) -> None:
    """Name shared memory there: in /dev/shm are that of others, and what they have left."""
    hierarchy.SharedFile = functools.partial(SharedFile, directory=directory)


def listen_at(address: str) -> None:
    """Listen there, whatever the cluster says: a proxy has the address that all ranks know."""
    grpc.listen_address = lambda _: address


def _stop_for_a_second() -> None:
    waker = ["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"]
    with subprocess.Popen(waker):
        os.kill(os.getpid(), signal.SIGSTOP)


def _raise() -> None:
    raise RuntimeError("no more flour")


def _kill_parent() -> None:
    """Die, and leave a child behind, whose pid is printed, until standard input ends."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.read(sys.stdin.fileno(), 1)
        os._exit(0)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _disconnect() -> None:
    """Break all connections of this process, and listen no more."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as end:
            if end.family in (socket.AF_INET, socket.AF_INET6):
                end.shutdown(socket.SHUT_RDWR)


ACTIONS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill-parent": _kill_parent,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stop-1s": _stop_for_a_second,
    "sleep": lambda: time.sleep(STUCK_S),
    "hold-gil": lambda: ctypes.PyDLL(None).sleep(STUCK_S),
    "exit": sys.exit,
    "exit-3": lambda: sys.exit(3),
    "os-exit": lambda: os._exit(0),
    "disconnect": _disconnect,
    "raise": _raise,
}
