"""A process without the token that connects to the port of a rank, in four ways."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

IDLE, GETS, RANDOM, HELLOS = 1100, 1000, 200, 40
HOLD_S = 5.0
_TIMEOUT_S = 2.0
_BYTES = 4096
_HELLO_BYTES = 2_000_000
_Address = tuple[str, int]


def main(kind: str, host: str, port: str, seed: str) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    KINDS[kind]((host, int(port)), random.Random(int(seed)))


def hold_connections(address: _Address, chance: random.Random) -> None:
    """Opens more connections than many systems allow for a process, and sends nothing."""
    with contextlib.ExitStack() as stack:
        for _ in range(IDLE):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection(address, _TIMEOUT_S))
        time.sleep(HOLD_S)


def get(address: _Address, chance: random.Random) -> None:
    """Sends HTTP requests repeatedly, as a scanner does."""
    for _ in range(GETS):
        send(address, b"GET / HTTP/1.1\r\nHost: rank\r\n\r\n")


def send_random_bytes(address: _Address, chance: random.Random) -> None:
    """Sends random bytes, sometimes after the preface of HTTP/2."""
    for number in range(RANDOM):
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if number % 2 else b""
        send(address, preface + bytes(chance.choices(range(256), k=_BYTES)))


def send(address: _Address, data: bytes) -> None:
    """Sends bytes on a new connection and closes it, ignoring errors."""
    with contextlib.suppress(OSError), socket.create_connection(address, _TIMEOUT_S) as connection:
        connection.sendall(data)


def send_hellos(address: _Address, chance: random.Random) -> None:
    """Sends rendezvous requests of the maximum message size."""
    import grpc

    junk = chance.randbytes(_HELLO_BYTES)
    metadata = [("rank", "1"), ("from", "0" * 16), ("to", "")]
    unlimited = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel("{}:{}".format(*address), unlimited) as channel:
        hello = channel.unary_unary("/hostopt.Ring/Hello")
        calls = [hello.future(junk, _TIMEOUT_S, metadata) for _ in range(HELLOS)]
        for call in calls:
            call.exception()


KINDS: dict[str, Callable[[_Address, random.Random], None]] = {
    "idle-connections": hold_connections,
    "gets": get,
    "random-bytes": send_random_bytes,
    "hellos": send_hellos,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
