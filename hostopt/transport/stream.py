"""Streams of frames from this rank to its peers."""

from __future__ import annotations

import abc
from typing import Callable

from hostopt.transport import event_loop
from hostopt.transport.message import Payload, Tag


class Stream(abc.ABC):
    """Frames to one peer; used on the event loop.

    Attributes:
      writing_since_s: start of the write in progress, on the monotonic clock; None without one.
      written_s: duration of all completed writes, in seconds.
    """

    def __init__(self) -> None:
        self.writing_since_s: float | None = None
        self.written_s = 0.0

    @property
    @abc.abstractmethod
    def ended(self) -> bool:
        """True once nothing can be sent any more, and the reason is known."""

    @abc.abstractmethod
    async def wait_until_open(self, timeout_s: float) -> bool:
        """Returns True once the peer reads the stream; then each side detects the other's end."""

    @abc.abstractmethod
    async def put(self, tag: Tag, payload: Payload) -> bool:
        """Sends a message, or queues it.

        Args:
          payload: contiguous bytes; may be changed once this returns.

        Returns:
          False if the stream has `ended`, or made no progress before the deadline.
        """

    @abc.abstractmethod
    async def flush(self) -> None:
        """Ends the stream in good order, and returns once the peer has all frames."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Ends the stream at once and drops frames that are not sent."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Cancels the stream and closes its connection."""


class Streams:
    """The streams of one rank, each opened by the first message to its peer."""

    def __init__(self, open_stream: Callable[[int], Stream]) -> None:
        self._open_stream = open_stream
        self._streams: dict[int, Stream] = {}

    def to(self, peer: int) -> Stream:
        """Returns the stream to a peer; opens it if there is none."""
        if peer not in self._streams:
            self._streams[peer] = self._open_stream(peer)
        return self._streams[peer]

    def all(self) -> list[Stream]:
        """Returns the open streams; may be called from any thread."""
        return list(self._streams.values())

    def cancel(self, peer: int) -> None:
        """Cancels the stream to a peer, if there is one."""
        if peer in self._streams:
            self._streams[peer].cancel()

    def forget(self, peer: int, only: Stream | None = None) -> None:
        """Closes and removes the stream to a peer, if there is one.

        Args:
          only: the stream, if another one is to stay.
        """
        stream = self._streams.get(peer)
        if stream is not None and only in (None, stream):
            del self._streams[peer]
            event_loop.start(stream.close())

    def blocked(self) -> dict[int, float]:
        """Returns the monotonic start of each write in progress, by peer; on any thread."""
        since = {peer: stream.writing_since_s for peer, stream in list(self._streams.items())}
        return {peer: since_s for peer, since_s in since.items() if since_s is not None}
