"""Closes connections to this rank that no peer has called over, if they are too many or too old.

Older releases of gRPC do not limit the number of connections, and newer ones have one limit for
all callers. Therefore each rank examines its file descriptors regularly for connections to its own
server, and shuts some of them down. gRPC then closes them as if the caller had closed them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import re
import socket
import stat
import time
from collections import Counter
from typing import Callable, NamedTuple
from urllib.parse import unquote

from hostopt.process import error_report
from hostopt.process.descriptors import limit, open_descriptors
from hostopt.transport.addresses import host_and_port
from hostopt.transport.grpc import limits
from hostopt.transport.security import Identity

_log = logging.getLogger(__name__)

# Descriptors are examined after this time even if their number has not changed.
_SCAN_ANYWAY_S = 5.0
_MAX_AGE_OF_A_PAUSE_S = 2 * limits.SCAN_EVERY_S


class Endpoint(NamedTuple):
    """The caller's end of a connection."""

    host: str
    port: int


class Strangers:
    """The connections to one server; used on the event loop."""

    def __init__(self, size: int, is_peer: Callable[[Identity], bool]) -> None:
        self._most = limits.most_strangers(size)
        self._is_peer = is_peer
        self._claims: dict[Endpoint, Identity] = {}
        self._streams: dict[int, Endpoint] = {}  # connection of the open stream, by rank
        self._strangers: dict[Endpoint, float] = {}  # time of the first scan that found it
        self._shut_down: set[Endpoint] = set()  # by the last scan
        self._warned: set[str] = set()
        self._scanned_s = 0.0
        self._descriptors = 0

    def add_claim(self, address: str, claim: Identity) -> None:
        """Notes the claim of a caller; only some connections of each claim count as a peer's."""
        endpoint = parse_endpoint(address)
        if endpoint is not None:
            self._claims[endpoint] = claim

    def add_stream(self, address: str, rank: int) -> bool:
        """Notes the connection of a peer's stream; False if it has been shut down already."""
        endpoint = parse_endpoint(address)
        if endpoint in self._shut_down:
            return False
        if endpoint is not None:
            self._streams[rank] = endpoint
        return True

    def _peers(self) -> set[Endpoint]:
        peers, connections = set(self._streams.values()), Counter[Identity]()
        for endpoint, claim in self._claims.items():
            connections[claim] += 1
            if connections[claim] <= limits.CONNECTIONS_OF_A_PEER and self._is_peer(claim):
                peers.add(endpoint)
        return peers

    async def watch(self, address: str, port: int) -> None:
        """Closes connections of strangers to a numeric address until it is cancelled."""
        try:
            # opened now, as there may be no descriptor left later
            with _Probe(host_and_port(address)[0], port) as probe:
                await self._watch(probe)
        except Exception as error:
            _log.warning(
                "connections of strangers are not closed any more: %s. Let a firewall admit only "
                "the hosts of the cluster",
                error_report.cause_of(error),
            )

    async def _watch(self, probe: _Probe) -> None:
        last_s, awake_s, scan_at_s, lowest = time.monotonic(), 0.0, 0.0, 0
        while True:
            await asyncio.sleep(limits.pause_s(limit()))
            now_s = time.monotonic()
            # The time that this process was frozen does not count: calls that arrived meanwhile
            # must be read first.
            awake_s += min(now_s - last_s, _MAX_AGE_OF_A_PAUSE_S)
            last_s = now_s
            if awake_s >= scan_at_s or probe.lowest_free() > lowest + limits.BURST:
                with contextlib.suppress(OSError):  # the next scan may succeed
                    self._scan(probe, awake_s)
                scan_at_s, lowest = awake_s + limits.SCAN_EVERY_S, probe.lowest_free()

    def _scan(self, probe: _Probe, now_s: float) -> None:
        descriptors = open_descriptors()
        is_same = not self._strangers and len(descriptors) == self._descriptors
        self._descriptors = len(descriptors)
        if is_same and now_s < self._scanned_s + _SCAN_ANYWAY_S:
            return
        self._scanned_s = now_s
        connections = {end: fd for fd in descriptors if (end := probe.endpoint(fd)) is not None}
        self._claims = {end: claim for end, claim in self._claims.items() if end in connections}
        self._streams = {rank: end for rank, end in self._streams.items() if end in connections}
        self._strangers = {
            end: self._strangers.get(end, now_s) for end in connections.keys() - self._peers()
        }
        oldest = sorted(self._strangers, key=self._strangers.__getitem__)
        too_many = max(len(oldest) - self._most, 0)
        self._shut_down.clear()
        for number, end in enumerate(oldest):
            if number < too_many or now_s > self._strangers[end] + limits.STRANGER_S:
                probe.shut_down(connections[end], end)
                self._shut_down.add(end)
                self._warn(end)
        probe.release()

    def _warn(self, endpoint: Endpoint) -> None:
        if endpoint.host in self._warned or len(self._warned) >= limits.SHOWN_STRANGERS:
            return
        self._warned.add(endpoint.host)
        _log.warning(
            "connections from %s are closed, as no rank has called over them and they are more "
            "than %d or older than %g s. Let a firewall admit only the hosts of the cluster",
            endpoint.host,
            self._most,
            limits.STRANGER_S,
        )


class _Probe:
    """Examines sockets of other code in this process, at the address of the server.

    gRPC may close a descriptor at any time, and its number may then be reused for another file. So
    each descriptor is first duplicated with `dup2` onto the probe's own descriptor, which needs no
    new one.
    """

    def __init__(self, host: str, port: int) -> None:
        is_any = ipaddress.ip_address(host).is_unspecified
        self._host = None if is_any else _endpoint(host, port)
        self._port = port
        # getsockname of an AF_UNIX socket has room for the addresses of every family
        self._spare = socket.socket(socket.AF_UNIX)
        self._socket = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> _Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._spare.close()

    def endpoint(self, fd: int) -> Endpoint | None:
        """Returns the caller's end of a connection to the server; None for other descriptors."""
        return self._endpoint() if self._duplicate(fd) else None

    def shut_down(self, fd: int, endpoint: Endpoint) -> None:
        """Shuts down a connection, unless the descriptor has another other end by now."""
        if self._duplicate(fd) and self._endpoint() == endpoint:
            with contextlib.suppress(OSError):  # it has ended
                self._socket.shutdown(socket.SHUT_RDWR)

    def lowest_free(self) -> int:
        """Returns the next descriptor that this process gets, about the number of open ones."""
        try:
            fd = os.dup(self._spare.fileno())
        except OSError:  # none is left
            return limit()
        os.close(fd)
        return fd

    def release(self) -> None:
        """Closes the last duplicate: a connection ends when its last descriptor is closed."""
        os.dup2(self._spare.fileno(), self._socket.fileno(), inheritable=False)

    def _duplicate(self, fd: int) -> bool:
        with contextlib.suppress(OSError):  # it is closed
            if stat.S_ISSOCK(os.fstat(fd).st_mode) and fd != self._socket.fileno():
                os.dup2(fd, self._socket.fileno(), inheritable=False)
                return True
        return False

    def _endpoint(self) -> Endpoint | None:
        with contextlib.suppress(OSError):  # it is a listening socket, or has ended
            name = self._socket.getsockname()
            if isinstance(name, tuple) and isinstance(name[0], str) and self._is_server(*name[:2]):
                host, port, *_ = self._socket.getpeername()
                return _endpoint(host, port)
        return None

    def _is_server(self, host: str, port: int) -> bool:
        return port == self._port and self._host in (None, _endpoint(host, port))


def parse_endpoint(address: str) -> Endpoint | None:
    """Parses gRPC's format, such as ``ipv4:10.0.0.1:4711`` or ``ipv6:%5B::1%5D:4711``."""
    match = re.fullmatch(r"ipv[46]:\[?([^\]]+)\]?:(\d+)", unquote(address))
    return _endpoint(match[1], int(match[2])) if match else None


def _endpoint(host: str, port: int) -> Endpoint | None:
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return Endpoint(str(getattr(ip, "ipv4_mapped", None) or ip), port)
