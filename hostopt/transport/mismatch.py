"""The collective calls of the ranks: a log for status requests, and the error if they differ.

Two ranks may detect the same mismatch at the same time, each with another neighbour. So the rank
that detects it asks all ranks for their calls, and all ranks report the same text.

Two ranks that wait in calls on different channels may each be about to make the other's. The waits
of all ranks prove a deadlock if nothing that is waited for is on its way, and if no rank has
computed anything since the last look, or if they last longer than a stall that is warned of.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hostopt.cluster.cluster import Cluster
from hostopt.errors import CollectiveMismatchError, HostOptError, cut, error_from_dict
from hostopt.transport.message import Signature
from hostopt.transport.stall import RequestStatus, Wait

Call = dict[str, Any]  # what `CallLog.last` returns
_MAX_REASON_BYTES = 6_000  # as JSON
_RETRY_AFTER_S = 0.1  # for ranks that are about to make their call
_SHOWN_CALLS = 4
_FROM_S = 1.9  # of a wait: the looks are at 2 s, 4 s, and so on
_MAX_WAITS = 64  # of a stream in a look, each of which is a question to another rank
_MAX_LOAD = 0.3  # threads of a process that only waits: it polls
_SHOWN_RANKS = 4


class CallLog:
    """The last call on each channel, and the calls that this rank has refused."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int, Signature]] = {}
        self._refused: dict[tuple[int, int], str] = {}  # reason by channel and step

    def record(self, channel: int, step: int, bucket: int, signature: Signature) -> None:
        """Records a call of this rank: number `step` on its channel."""
        self._last[channel] = step, bucket, signature

    def refuse(self, channel: int, step: int, reason: str) -> None:
        """Records a call that this rank never makes, so the other ranks must not wait for it."""
        self._refused[channel, step] = cut(reason, _MAX_REASON_BYTES)

    def last(self, channel: int) -> Call | None:
        """Returns the last call on a channel in types that JSON supports; None without one."""
        call = self._last.get(channel)
        if call is None:
            return None
        step, bucket, (text, checksum) = call
        return {"step": step, "bucket": bucket, "signature": text, "checksum": checksum}

    def about(self, tag: Sequence[int]) -> dict[str, Any]:
        """Returns the last "call" on the channel of a message, and why its call was "refused"."""
        return {"call": self.last(tag[0]), "refused": self._refused.get((tag[0], tag[1]))}


async def find_mismatch(
    cluster: Cluster, peer: int, tag: Sequence[int], request_status: RequestStatus
) -> HostOptError:
    """Asks all ranks which call they make in place of this rank's call; returns the error."""
    assert cluster.rank is not None
    signatures: dict[int, str] = {}
    for attempt in range(2):
        if attempt:
            await asyncio.sleep(_RETRY_AFTER_S)
        requests = (request_status(rank, cluster.rank, tag) for rank in range(cluster.size))
        statuses = await asyncio.gather(*requests)
        for status in statuses:
            if status is not None and status["error"]:
                return error_from_dict(status["error"])
        calls = {rank: status and status["call"] for rank, status in enumerate(statuses)}
        signatures = {
            rank: call["signature"]
            for rank, call in calls.items()
            if call is not None and is_same_call(call, tag)
        }
        if len(signatures) == cluster.size:
            break
    signatures.setdefault(peer, "another collective")
    return _mismatch_error(cluster, signatures, tag)


def is_same_call(call: Call, tag: Sequence[int]) -> bool:
    """Returns True if a call has the step and the bucket of a message."""
    return [call["step"], call["bucket"]] == list(tag[1:3])


def _mismatch_error(
    cluster: Cluster, signatures: dict[int, str], tag: Sequence[int]
) -> CollectiveMismatchError:
    first = {text: rank for rank, text in sorted(signatures.items(), reverse=True)}
    ranks = sorted(first.values())
    shown = [f"{cluster.describe(rank)} calls {signatures[rank]}" for rank in ranks[:_SHOWN_CALLS]]
    if len(ranks) > _SHOWN_CALLS:
        shown.append(f"and {len(ranks) - _SHOWN_CALLS} more calls differ")
    blamed = ranks[min(1, len(ranks) - 1)]
    return CollectiveMismatchError(
        f"{', '.join(shown)} at step {tag[1]}. Call the collectives in the same order with the "
        "same names, shapes and options on all ranks",
        **cluster.attributes(blamed),
        step=tag[1],
        bucket=tag[2],
    )


def busy_s() -> float:
    """Returns how long the threads of this process have run or waited for a core, in seconds."""
    ready_ns = 0
    for path in glob.glob("/proc/self/task/*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended
            ready_ns += int(Path(path).read_text().split()[1])
    return time.process_time() + ready_ns / 1e9


class Look(NamedTuple):
    """The waits of all ranks, none of which will end."""

    waits: dict[int, list[dict[str, Any]]]  # of each rank, the longest first
    busy_s: dict[int, float]
    time_s: float  # on the monotonic clock

    def proves(self, earlier: Look | None, long_s: float) -> bool:
        """Returns True if all ranks have waited for `long_s`, or done nothing since `earlier`."""
        if all(waits[-1]["for_s"] >= long_s for waits in self.waits.values()):
            return True
        if earlier is None or self._tags() != earlier._tags():
            return False
        most_s = _MAX_LOAD * (self.time_s - earlier.time_s)
        return all(self.busy_s[rank] - earlier.busy_s[rank] <= most_s for rank in self.waits)

    def error(self, cluster: Cluster) -> CollectiveMismatchError:
        """Returns the error that names the call in which each rank waits."""
        names = {rank: waits[0]["what"] or "a call" for rank, waits in self.waits.items()}
        shown = [f"{cluster.describe(rank)} waits in {name}" for rank, name in names.items()]
        if len(shown) > _SHOWN_RANKS:
            shown[_SHOWN_RANKS:] = [f"and {len(shown) - _SHOWN_RANKS} more"]
        other = next((rank for rank in names if names[rank] != names[0]), 1)
        return CollectiveMismatchError(
            f"{', '.join(shown)}: they wait for each other, and none of them can continue. Make "
            "the same calls on all ranks, and give optimizers the same names",
            **cluster.attributes(other),
        )

    def _tags(self) -> dict[int, list[list[int]]]:
        return {rank: sorted(wait["tag"] for wait in waits) for rank, waits in self.waits.items()}


@dataclass
class DeadlockWatch:
    """Looks for ranks that wait for each other; used on the event loop of rank 0."""

    _size: int
    _long_s: float  # length of a wait that is long in any program
    _last: Look | None = None

    def is_due(self, rank: int, wait: Wait, waits: Sequence[Wait]) -> bool:
        """Returns True if rank 0, which waits in any deadlock, has to look at all waits now."""
        oldest = min(waits, key=lambda each: each.since_s, default=None)
        return rank == 0 and wait is oldest and time.monotonic() - wait.since_s >= _FROM_S

    async def look(
        self, cluster: Cluster, tag: Sequence[int], request_status: RequestStatus, streams: int = 1
    ) -> CollectiveMismatchError | None:
        """Asks all ranks what they wait for; returns the error if they wait for each other."""
        most_waits = streams * _MAX_WAITS
        last, self._last = self._last, await self._waits(tag, request_status, most_waits)
        if self._last is None or not self._last.proves(last, self._long_s):
            return None
        return self._last.error(cluster)

    async def _waits(
        self, tag: Sequence[int], request_status: RequestStatus, most_waits: int
    ) -> Look | None:
        """Returns all waits; None if a rank waits for nothing, or if one of the waits will end."""
        waits: dict[int, list[dict[str, Any]]] = {}
        busy_s = {}
        for rank in range(self._size):
            status = await request_status(rank, rank, tag)
            if status is None or status["error"] or status["sends"] or not status["waits"]:
                return None
            waits[rank], busy_s[rank] = status["waits"], status["busy_s"]
        if sum(map(len, waits.values())) > most_waits:
            return None
        is_missing = False
        for rank, each in waits.items():
            for wait in each:
                status = await request_status(wait["peer"], rank, wait["tag"])
                if status is None or status["sent"]:
                    return None
                call = status["call"]
                if call is not None and [call["step"], call["bucket"]] > wait["tag"][1:3]:
                    return None  # the peer has made the call: its data are on their way
                if call is None or not is_same_call(call, wait["tag"]):
                    is_missing = True
                elif not any(own["tag"][:3] == wait["tag"][:3] for own in waits[wait["peer"]]):
                    return None  # the peer is in the call, and waits for nothing
        return Look(waits, busy_s, time.monotonic()) if is_missing else None


def refusal(cluster: Cluster, peer: int, reason: str) -> CollectiveMismatchError:
    """Returns the error of a rank that waits for a call which a peer has refused."""
    return CollectiveMismatchError(
        f"{cluster.describe(peer)} has refused {reason.rstrip('. ')}. Rank {cluster.rank} makes "
        "it: make the same calls on all ranks",
        **cluster.attributes(peer),
    )
