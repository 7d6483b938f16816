"""The collective calls of the ranks: a log for status requests, and the error if they differ.

Two ranks may detect the same mismatch at the same time, each with another neighbour. So the rank
that detects it asks all ranks for their calls, and all ranks report the same text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hostopt.cluster.cluster import Cluster
from hostopt.errors import CollectiveMismatchError, HostOptError, cut, error_from_dict
from hostopt.transport.message import Signature
from hostopt.transport.stall import RequestStatus

Call = dict[str, Any]  # what `CallLog.last` returns
_MAX_REASON_BYTES = 6_000  # as JSON
_RETRY_AFTER_S = 0.1  # for ranks that are about to make their call
_SHOWN_CALLS = 4


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
    cluster: Cluster,
    peer: int,
    tag: Sequence[int],
    local_call: Call | None,
    request_status: RequestStatus,
) -> HostOptError:
    """Asks all ranks which call they make in place of this rank's call; returns the error."""
    assert cluster.rank is not None
    peers = [rank for rank in range(cluster.size) if rank != cluster.rank]
    signatures: dict[int, str] = {}
    for attempt in range(2):
        if attempt:
            await asyncio.sleep(_RETRY_AFTER_S)
        requests = (request_status(each, cluster.rank, tag) for each in peers)
        statuses = dict(zip(peers, await asyncio.gather(*requests)))
        for status in statuses.values():
            if status is not None and status["error"]:
                return error_from_dict(status["error"])
        calls: dict[int, Call | None] = {cluster.rank: local_call}
        calls |= {rank: status and status.get("call") for rank, status in statuses.items()}
        signatures = {
            rank: call["signature"]
            for rank, call in sorted(calls.items())
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
