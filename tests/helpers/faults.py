"""Faults of a rank, injected from outside: hostopt has no hooks for tests.

A `FaultPlan` names the rank, the step, the point in the step and the action. Points:

    before-rendezvous  before the rendezvous
    between-steps   in the program, before the step's first bucket
    before-send     before the first message of the step; in shared memory, the first barrier
    mid-chunk       after some messages of the step
    after-reduce    after the first bucket of the step is reduced, before the others are
    after-training  after all steps, on all ranks
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
from dataclasses import asdict, dataclass, replace
from typing import Any

from hostopt.collectives import shared_file
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.sequence_counters import SequenceCounters
from hostopt.transport.grpc import ring as grpc_ring
from hostopt.transport.grpc import server
from hostopt.transport.grpc.data_streams import END_OF_STREAM

STUCK_S = 20  # longer than any test waits
_MESSAGES_BEFORE = {"before-send": 0, "mid-chunk": 1}


@dataclass(frozen=True)
class FaultPlan:
    """One fault.

    Args:
      step: step of the communicator, from 0.
      point: point in the step; see the module.
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


def trigger(point: str, rank: int | None, plan: FaultPlan | None) -> None:
    """Triggers the fault if the plan has this rank and this point, outside of steps."""
    if plan is not None and (plan.point, plan.rank) == (point, rank):
        ACTIONS[plan.action]()


def inject(communicator: Communicator, plan: FaultPlan | None) -> None:
    """Prepares the fault in this process if it is the rank of the plan.

    The steps of the communicator are counted.
    """
    if plan is not None and plan.rank == communicator.rank:
        if plan.point in _MESSAGES_BEFORE:
            _inject_among_messages(communicator, plan)
        else:
            _inject_around_reduction(communicator, plan)


def _inject_among_messages(communicator: Communicator, plan: FaultPlan) -> None:
    messages = []
    send, barrier = communicator.transport.send, SequenceCounters.barrier

    def count(channel: int, step: int) -> None:
        if (channel, step) == (communicator.channel, plan.step):
            messages.append(step)
            if len(messages) == _MESSAGES_BEFORE[plan.point] + 1:
                ACTIONS[plan.action]()

    async def count_and_send(peer: int, tag: Any, *message: Any) -> None:
        count(tag.channel, tag.step)
        await send(peer, tag, *message)

    def count_and_wait(counters: SequenceCounters, call: Any, round_: int) -> None:
        count(call.channel, call.step)
        barrier(counters, call, round_)

    communicator.transport.send = count_and_send
    SequenceCounters.barrier = count_and_wait  # this process belongs to the test


def _inject_around_reduction(communicator: Communicator, plan: FaultPlan) -> None:
    reduce = communicator.all_reduce_in_place

    def reduce_with_fault(flat: Any, op: Any, call: Any, *rest: Any) -> None:
        here = (call.step, call.bucket) == (plan.step, 0)
        if here and plan.point == "between-steps":
            ACTIONS[plan.action]()
        reduce(flat, op, call, *rest)
        if here and plan.point == "after-reduce":
            ACTIONS[plan.action]()

    communicator.all_reduce_in_place = reduce_with_fault


def send_again(communicator: Communicator, when: str) -> None:
    """Writes each frame to the next rank twice, below all checks of the sender.

    `when` is ``at-once``, or ``later``: after 60 other frames.
    """
    stream = communicator.transport._streams.to((communicator.rank + 1) % communicator.size)
    write, written = stream._call.write, []

    async def write_again(message: bytes) -> None:
        await write(message)
        if message != END_OF_STREAM:
            written.append(message)
        if len(written) > {"at-once": 0, "later": 60}[when]:
            await write(written.pop(0))

    stream._call.write = write_again


def set_ping_times(seconds: float) -> None:
    """Sets the interval and the deadline of pings in this process."""
    grpc_ring.DEFAULT = replace(grpc_ring.DEFAULT, keepalive_s=seconds, ping_timeout_s=seconds)


def share_memory_in(directory: str) -> None:
    """Creates shared memory in this directory; /dev/shm has files of other programs."""
    shared_file.create = functools.partial(shared_file.create, directory=directory)


def listen_at(address: str) -> None:
    """Listens at this address instead of the one in the cluster, which a proxy has."""
    server.listen_address = lambda _: address


def _stop_for_a_second() -> None:
    waker = ["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"]
    with subprocess.Popen(waker):
        os.kill(os.getpid(), signal.SIGSTOP)


def _raise() -> None:
    raise RuntimeError("no more flour")


def _kill_parent() -> None:
    """Kills this process; a child, whose pid is printed, lives until standard input ends."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.read(sys.stdin.fileno(), 1)
        os._exit(0)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _disconnect() -> None:
    """Shuts down all connections of this process and its listening socket."""
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
