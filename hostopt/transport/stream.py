"""The interface of a stream of frames from this rank to a peer."""

from __future__ import annotations

import abc

from hostopt.transport.message import Payload, Tag


class Stream(abc.ABC):
    """Frames to one peer; used on the event loop."""

    def __init__(self) -> None:
        self.writing_since_s: float | None = None  # on the monotonic clock
        self.written_s = 0.0  # of all completed writes

    @property
    @abc.abstractmethod
    def ended(self) -> bool:
        """True once nothing can be sent any more, and the reason is known."""

    @abc.abstractmethod
    async def wait_until_open(self, timeout_s: float) -> bool:
        """Returns True once the peer reads the stream; then each side detects the other's end."""

    @abc.abstractmethod
    async def put(self, tag: Tag, payload: Payload) -> bool:
        """Sends or queues contiguous bytes, which may change once this returns.

        Returns False if the stream has `ended`, or made no progress before the deadline.
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
