"""What ranks find out together, where a doctor runs on each of them at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from hostopt.clock import measure_offset
from hostopt.cluster import Cluster
from hostopt.communicator import Communicator
from hostopt.connect import meet
from hostopt.doctor.checking import NOTE, OK, WRONG, Finding
from hostopt.doctor.machine import existing, trial_file
from hostopt.doctor.network import calls
from hostopt.doctor.software import installed
from hostopt.errors import RendezvousTimeoutError
from hostopt.options import Options
from hostopt.transport import event_loop
from hostopt.transport.base import Tag

__all__: list[str] = []

_MUST_BE_SAME = ("hostopt", "tensorflow", "tf_keras")
_CLOCKS_DIFFER_S = 1.0
_MEASURE_S = 0.25
_MESSAGE_BYTES = 256 << 10
_SLOW_BYTES_PER_S = 100e6  # about what 1 Gbit/s carries


def other_ranks(
    ring: Cluster, options: Options, model_dir: str | None, timeout_s: float
) -> Iterator[Finding]:
    """Meet the doctors of all other ranks as a training would, and compare.

    Args:
      ring: its ranks meet.
      options: as a training has them, apart from deadlines.
      model_dir: where this rank's training writes; None where that was not said.
      timeout_s: how long to wait for the others, and then for each answer.

    Yields:
      Findings, not the same on all ranks.
    """
    options = replace(
        options,
        rendezvous_timeout_s=timeout_s,
        collective_timeout_s=timeout_s,
        timeline=None,
        debug_dir=None,
    )
    try:
        communicator = meet(ring, options, service="hostopt.Doctor")
    except RendezvousTimeoutError as error:
        missing = error.root_cause or ""
        yield Finding(
            NOTE,
            f"skipped what ranks find out together, {missing}: to check it, start `hostopt "
            "doctor` on all ranks at the same time",
        )
        yield from calls(
            [task for task in ring.ring if f"{task.name} ({task.address})" in missing]
        )
        return
    with communicator:
        yield Finding(OK, f"all {communicator.size} ranks have met, with the same options")
        for check in (_memory, _versions, clocks, links):
            yield from check(communicator)
        yield from _shared_dir(communicator, model_dir)
        communicator.barrier("the end of the examination")


def _memory(communicator: Communicator) -> Iterator[Finding]:
    groups = communicator.hosts.groups if communicator.hosts else ()
    shared = [group for group in groups if len(group) > 1]
    if shared:
        text = "; ".join(", ".join(map(str, group)) for group in shared)
        yield Finding(OK, f"ranks that share memory: {text}")


def _versions(communicator: Communicator) -> Iterator[Finding]:
    tables = _gather(communicator, installed(), "the versions of the doctors")
    names = list(dict.fromkeys(name for table in tables for name in table))
    different = [name for name in names if len({table.get(name) for table in tables}) > 1]
    for name in different:
        found = ", ".join(f"rank {rank} {table.get(name)}" for rank, table in enumerate(tables))
        if name in _MUST_BE_SAME:
            yield Finding(WRONG, f"{name} differs: {found}. Install the same on all ranks")
        else:
            yield Finding(NOTE, f"{name} differs: {found}")
    if not different:
        yield Finding(OK, "the same versions on all ranks")


def clocks(communicator: Communicator, now: Callable[[], float] = time.time) -> Iterator[Finding]:
    """Whether this rank's clock is that of rank 0."""
    mine = measure_offset(communicator.duplicate("the clocks of the doctors"), now)
    if communicator.rank == 0:
        return
    late_s = abs(mine.offset_s)
    if late_s - mine.round_trip_s > _CLOCKS_DIFFER_S:
        side = "behind" if mine.offset_s > 0 else "ahead of"
        yield Finding(
            WRONG,
            f"this clock is {late_s:.1f} s {side} rank 0's: let NTP set both. Times of files and "
            "of certificates are compared with it",
        )
    else:
        most_s = late_s + mine.round_trip_s / 2
        yield Finding(
            OK,
            f"this clock is rank 0's to within {most_s * 1e3:.2f} ms; a message there and back "
            f"takes {mine.round_trip_s * 1e3:.2f} ms",
        )


def links(communicator: Communicator) -> Iterator[Finding]:
    """How fast data come from the rank before this one, while all ranks send."""
    sender = (communicator.rank - 1) % communicator.size
    communicator.barrier("the links between the doctors")
    bytes_per_s = event_loop.run(_stream(communicator.duplicate(), sender))
    text = f"rank {sender} sends this rank {bytes_per_s / 1e6:.0f} MB/s over gRPC"
    if bytes_per_s < _SLOW_BYTES_PER_S:
        step_s = 100e6 / bytes_per_s
        yield Finding(NOTE, f"{text}: gradients of 100 MB take more than {step_s:.1f} s a step")
    else:
        yield Finding(OK, text)


async def _stream(communicator: Communicator, sender: int) -> float:
    """All ranks send to the next one for a while, and receive; bytes by second received."""
    transport, what = communicator.transport, "data of the doctor"
    first = Tag(communicator.channel, 0)

    async def send() -> None:
        receiver, end_s = (transport.rank + 1) % transport.size, time.monotonic() + _MEASURE_S
        payload, count = bytes(_MESSAGE_BYTES), 0
        while time.monotonic() < end_s:
            await transport.send(receiver, first._replace(step=count), payload, what)
            count += 1
        await transport.send(receiver, first._replace(step=count), b"", what)

    async def receive() -> float:
        begin_s, count = time.monotonic(), 0
        while await transport.recv(sender, first._replace(step=count), what):
            count += 1
        return count * _MESSAGE_BYTES / (time.monotonic() - begin_s)

    sending = asyncio.ensure_future(send())
    try:
        bytes_per_s = await receive()
    finally:
        await sending
    return bytes_per_s


def _shared_dir(communicator: Communicator, model_dir: str | None) -> Iterator[Finding]:
    """Rank 0 writes a file into its model_dir, and the others look for it in theirs."""
    name, directory = "", existing(model_dir) if model_dir and "://" not in model_dir else None
    with contextlib.ExitStack() as stack:
        if communicator.rank == 0 and directory is not None:
            with contextlib.suppress(OSError):  # which another check says
                name = stack.enter_context(trial_file(directory))
        name = _gather(communicator, name, "the name of a file in model_dir")[0]
        sees = None if directory is None else os.path.exists(os.path.join(directory, name))
        all_see = _gather(communicator, sees, "who sees a file in model_dir")
    if communicator.rank != 0 or not name:
        return
    blind = [f"rank {rank}" for rank, sees in enumerate(all_see) if sees is False]
    if blind:
        yield Finding(
            NOTE,
            f"model_dir is not shared: {', '.join(blind)} cannot see rank 0's. Ranks need not, as "
            "rank 0 alone writes there, but an evaluator does",
        )
    elif None not in all_see:
        yield Finding(OK, "model_dir is shared by all ranks")


def _gather(communicator: Communicator, facts: Any, what: str) -> list[Any]:
    texts = communicator.all_gather_bytes(json.dumps(facts).encode(), what)
    return [json.loads(text) for text in texts]
