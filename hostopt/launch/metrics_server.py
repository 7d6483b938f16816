"""Answers HTTP requests at a port of this machine, whoever reaches it.

docs/security.md lists what a stranger can take: so many connections, for so long.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

MOST_CONNECTIONS = 16
CONNECTION_S = 5.0  # from the connection to the end of the answer
REQUEST_BYTES = 8 << 10
_BACKLOG = 8  # connections that are accepted at once


@contextlib.contextmanager
def answering(
    listener: socket.socket, answer: Callable[[], bytes], content_type: str
) -> Iterator[None]:
    """Scope in which a thread answers each GET request.

    Args:
      listener: a bound socket, which the scope closes.
      answer: returns the body of an answer.
    """
    loop = asyncio.new_event_loop()
    callers = _Callers(answer, content_type)
    server = loop.run_until_complete(
        asyncio.start_server(callers.serve, sock=listener, limit=REQUEST_BYTES, backlog=_BACKLOG)
    )
    thread = threading.Thread(target=loop.run_forever, daemon=True, name="hostopt-metrics")
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.run_until_complete(_end_all())
        loop.close()


async def _end_all() -> None:
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Callers:
    """The connections, of which each brings one request.

    Args:
      answer: returns the body of an answer.
    """

    def __init__(self, answer: Callable[[], bytes], content_type: str) -> None:
        self._answer = answer
        self._content_type = content_type
        self._tasks: list[asyncio.Task[None]] = []  # the oldest first

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers a new caller; ends the oldest ones if there are too many."""
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)
        for oldest in self._tasks[:-MOST_CONNECTIONS]:
            oldest.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await asyncio.wait_for(self._answer_one(reader, writer), CONNECTION_S)
        except (OSError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError):
            pass  # the caller has left, or takes too much
        finally:
            writer.transport.abort()

    async def _answer_one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        status, body = "405 Method Not Allowed", b""
        if request.startswith(b"GET "):
            status, body = "200 OK", self._answer()
        head = (
            f"HTTP/1.1 {status}",
            f"Content-Type: {self._content_type}",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        writer.write("".join(f"{line}\r\n" for line in (*head, "")).encode() + body)
        writer.close()
        await writer.wait_closed()
