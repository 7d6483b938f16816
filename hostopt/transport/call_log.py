"""The collective calls of this rank, by channel, for status requests of peers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hostopt.errors import cut
from hostopt.transport.signature import Signature

Call = dict[str, Any]  # what `CallLog.last` returns
_MAX_REASON_BYTES = 6_000  # as JSON


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
