"""Memory for payloads: a rank that waits for a message offers the place where it belongs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from hostopt.transport.message import Tag


class Destination:
    """Memory for the payload of one message."""

    def __init__(self, view: memoryview) -> None:
        self.view = view

    def withdraw(self) -> None:
        """Redirects a payload that is still arriving; its beginning is kept."""
        self.view = memoryview(bytearray(self.view))


class Destinations:
    """The offers of one rank; used on the event loop."""

    def __init__(self) -> None:
        self._offered: dict[tuple[int, Tag], Destination] = {}

    @contextlib.contextmanager
    def offer(self, peer: int, tag: Tag, view: memoryview | None) -> Iterator[None]:
        """Offers memory for a payload in this scope; nothing is written after an exception."""
        if view is None:
            yield
            return
        self._offered[peer, tag] = destination = Destination(view)
        try:
            yield
        except BaseException:
            destination.withdraw()
            raise
        finally:
            del self._offered[peer, tag]

    def of(self, peer: int, tag: Tag, nbytes: int) -> Destination:
        """Returns the memory for a payload whose header has arrived.

        Returns:
          The offered memory if signature and size are the same; otherwise new memory.
        """
        destination = self._offered.get((peer, tag))
        if destination is None or len(destination.view) != nbytes:
            return Destination(memoryview(np.empty(nbytes, np.uint8)))
        return destination
