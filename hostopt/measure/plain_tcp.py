"""Measures plain TCP between the ranks, the upper limit of collectives over the network."""

from __future__ import annotations

import math
import secrets
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hostopt.collectives.communicator import Communicator, all_gather_json
from hostopt.transport.addresses import host_and_port, listen_address, port_of

_TIMEOUT_S = 5.0
_CHUNK_BYTES = 256 << 10
_LEAST_S = 0.2  # of a stream that shows the speed of a line
_SAMPLES = 3
_WORD_BYTES = 16


class PlainTcp:
    """TCP connections from each rank to the next one, for measurements.

    Collective, as is its method: all ranks must call it.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        rank, ring = communicator.rank, communicator.transport.cluster.ring
        next_ = (rank + 1) % communicator.size
        host, _ = host_and_port(listen_address(ring[rank].address))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sockets: list[socket.socket] = []  # to the next rank, from the previous one
        with socket.create_server((host, 0), family=family) as server:
            word = secrets.token_hex(_WORD_BYTES)
            offers = all_gather_json(communicator, [port_of(server), word], "plain TCP")
            port, secret = offers[next_]
            server.settimeout(_TIMEOUT_S)
            try:
                address = host_and_port(ring[next_].address)[0], port
                self._sockets.append(socket.create_connection(address, _TIMEOUT_S))
                self._sockets[0].sendall(bytes.fromhex(secret))
                self._sockets.append(server.accept()[0])
                self._sockets[1].settimeout(_TIMEOUT_S)
                if self._sockets[1].recv(_WORD_BYTES, socket.MSG_WAITALL) != bytes.fromhex(word):
                    self.close()  # a stranger has called
            except OSError:  # `seconds` reports it
                self.close()

    def __enter__(self) -> PlainTcp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        for each in self._sockets:
            each.close()

    def seconds(self, size_bytes: int) -> float:
        """Returns how long the slowest rank takes to send that much, and to receive it meanwhile.

        Raises ConnectionError on all ranks if one of them cannot reach the next one.
        """
        self._communicator.barrier("a stream of plain TCP")
        try:
            seconds = self._stream(size_bytes)
        except OSError:
            seconds = math.inf
            self.close()  # no neighbour waits for the rest
        slowest = float(self._communicator.all_gather(np.array([seconds]), "times of TCP").max())
        if slowest == math.inf:
            raise ConnectionError("a rank cannot reach the next one by plain TCP")
        return slowest

    def _stream(self, size_bytes: int) -> float:
        if len(self._sockets) < 2:
            raise ConnectionError("the ranks are not connected")
        outgoing, incoming = self._sockets
        started_s = time.perf_counter()

        def send() -> None:
            chunk = memoryview(bytes(_CHUNK_BYTES))
            for start in range(0, size_bytes, _CHUNK_BYTES):
                outgoing.sendall(chunk[: size_bytes - start])

        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(send)
            buffer, left_bytes = bytearray(_CHUNK_BYTES), size_bytes
            while left_bytes:
                received = incoming.recv_into(buffer, min(left_bytes, _CHUNK_BYTES))
                if not received:
                    raise ConnectionResetError("the previous rank has closed the connection")
                left_bytes -= received
            sending.result()
        return time.perf_counter() - started_s


def gbit_per_s(communicator: Communicator) -> float | None:
    """Returns the payload that a TCP connection carries from rank to rank, of the slowest.

    Collective: all ranks must call it. The result is None if no collective uses TCP or they use
    other interfaces, and if the ranks cannot reach each other's ports.
    """
    uses_no_tcp = communicator.on_one_host or communicator.world is not None
    if communicator.size == 1 or uses_no_tcp or communicator.transport.options.interfaces:
        return None
    try:
        with PlainTcp(communicator) as streams:
            size_bytes = _CHUNK_BYTES
            while (seconds := streams.seconds(size_bytes)) < _LEAST_S:
                size_bytes *= 4
            for _ in range(_SAMPLES - 1):
                seconds = min(seconds, streams.seconds(size_bytes))
    except ConnectionError as error:
        if communicator.rank == 0:
            sys.stderr.write(f"hostopt: plain TCP is not measured: {error}\n")
        return None
    return 8e-9 * size_bytes / seconds
