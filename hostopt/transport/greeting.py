"""Asks a server of HTTP/2, such as one of gRPC, for a sign of life."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import Callable

from hostopt.process import descriptors
from hostopt.transport.addresses import host_and_port

# RFC 9113: a client begins with this text and its SETTINGS, which may be empty. The server answers
# with its own, before any call.
_HEADER_BYTES = 9
_SETTINGS = 4  # type of the frame, the fourth byte of its header
_ANSWER_S, _POLL_S = 1.0, 0.5  # of `wait_for`
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])


def listens(address: str, timeout_s: float) -> bool:
    """Returns True if a process listens at an address, even if it is frozen."""
    try:
        socket.create_connection(host_and_port(address), timeout_s).close()
    except OSError as error:
        descriptors.check(error)
        return False
    return True


def greets(address: str, timeout_s: float) -> bool:
    """Returns True if a server of HTTP/2 answers.

    The kernel connects to a frozen process as well, so this waits for the server's first frame.
    """
    try:
        with socket.create_connection(host_and_port(address), timeout_s) as connection:
            connection.sendall(_GREETING)
            header = connection.recv(_HEADER_BYTES, socket.MSG_WAITALL)
    except OSError as error:
        descriptors.check(error)
        return False
    return header[3:4] == bytes([_SETTINGS])


async def is_silent(address: str, timeout_s: float) -> bool:
    """Returns True if a process is frozen, or its host or link is silent.

    The kernel refuses or ends a connection to a process that is gone. This works while the
    interpreter exits, when no thread can be started, unless a host name has to be looked up.
    """
    try:
        opening = asyncio.open_connection(*host_and_port(address))
        reader, writer = await asyncio.wait_for(opening, timeout_s)
        with contextlib.closing(writer):
            writer.write(_GREETING)
            await asyncio.wait_for(reader.read(_HEADER_BYTES), timeout_s)
    except (asyncio.TimeoutError, TimeoutError):  # different types before Python 3.11
        return True
    except OSError as error:
        return error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)
    except RuntimeError:  # no thread for the look-up
        return False
    return False


def wait_for(address: str, until_s: float, check: Callable[[], None] = lambda: None) -> bool:
    """Waits until a server of HTTP/2 answers; False at `until_s`, by `time.monotonic`."""
    while not greets(address, _ANSWER_S):
        check()
        if time.monotonic() > until_s:
            return False
        time.sleep(_POLL_S)
    return True
