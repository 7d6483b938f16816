"""Ends connections to this rank that nobody has shown to be a peer's, where they are many or old.

gRPC has no limit on them in older releases, and in newer ones one for all: who fills it keeps the
peers out. So a rank looks for the sockets of its own server among its file descriptors, now and
then. Those over which no rank has called are strangers'. The oldest of them are shut down until
few are left, and each of them after a while; gRPC then closes them as if the caller had.
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

from hostopt import error_report
from hostopt.descriptors import limit, open_descriptors
from hostopt.transport import limits
from hostopt.transport.addresses import host_and_port

__all__: list[str] = []

_log = logging.getLogger(__name__)

_LOOK_ANYWAY_S = 5.0  # where the number of descriptors is the same, they may be others
_MOST_PAUSE_S = 2 * limits.LOOK_EVERY_S  # that counts as age of a connection


class Caller(NamedTuple):
    """The other end of a connection.

    Args:
      host: its IP address.
      port: its port.
    """

    host: str
    port: int


class Life(NamedTuple):
    """Who a caller says it is.

    Args:
      rank: its rank.
      incarnation: which life of that rank.
    """

    rank: int
    incarnation: str


class Strangers:
    """The connections to one server; lives on the loop.

    Args:
      size: number of ranks.
      is_peer: whether whoever says so is a peer, as far as is known now.
    """

    def __init__(self, size: int, is_peer: Callable[[Life], bool]) -> None:
        self._most = limits.most_strangers(size)
        self._is_peer = is_peer
        self._claims: dict[Caller, Life] = {}
        self._streams: dict[int, Caller] = {}  # of each rank, the one that is open
        self._strangers: dict[Caller, float] = {}  # since when
        self._warned: set[str] = set()
        self._looked_s = 0.0
        self._descriptors = 0

    def claim(self, address: str, life: Life) -> None:
        """Note who calls over a connection; only so many connections of one life count.

        Args:
          address: of the caller, as gRPC has it.
          life: who it says it is.
        """
        caller = _caller(address)
        if caller is not None:
            self._claims[caller] = life

    def admit_stream(self, address: str, rank: int) -> None:
        """Note which connection the frames of a peer come over; it counts, whatever others do.

        Args:
          address: of the caller, as gRPC has it.
          rank: the peer, which has no other stream.
        """
        caller = _caller(address)
        if caller is not None:
            self._streams[rank] = caller

    def _peers(self) -> set[Caller]:
        peers, connections = set(self._streams.values()), Counter[Life]()
        for caller, life in self._claims.items():
            connections[life] += 1
            if connections[life] <= limits.CONNECTIONS_OF_A_PEER and self._is_peer(life):
                peers.add(caller)
        return peers

    async def watch(self, address: str, port: int) -> None:
        """End strangers' connections until this is cancelled.

        Args:
          address: numeric address and port where the server was to listen.
          port: where it does.
        """
        try:
            # now: later there may be no descriptor left
            with _Probe(host_and_port(address)[0], port) as probe:
                await self._watch(probe)
        except Exception as error:
            _log.warning(
                "connections of strangers are not ended any more: %s. Let a firewall admit the "
                "hosts of the cluster alone",
                error_report.cause_of(error),
            )

    async def _watch(self, probe: _Probe) -> None:
        last_s, awake_s, look_at_s, lowest = time.monotonic(), 0.0, 0.0, 0
        while True:
            await asyncio.sleep(limits.pause_s(limit()))
            now_s = time.monotonic()
            # after this process was frozen, calls that have come meanwhile are read first
            awake_s += min(now_s - last_s, _MOST_PAUSE_S)
            last_s = now_s
            if awake_s >= look_at_s or probe.lowest_free() > lowest + limits.BURST:
                with contextlib.suppress(OSError):  # the next look may find more
                    self._look(probe, awake_s)
                look_at_s, lowest = awake_s + limits.LOOK_EVERY_S, probe.lowest_free()

    def _look(self, probe: _Probe, now_s: float) -> None:
        descriptors = open_descriptors()
        is_same = not self._strangers and len(descriptors) == self._descriptors
        self._descriptors = len(descriptors)
        if is_same and now_s < self._looked_s + _LOOK_ANYWAY_S:
            return
        self._looked_s = now_s
        found = {caller: fd for fd in descriptors if (caller := probe.caller(fd)) is not None}
        self._claims = {caller: life for caller, life in self._claims.items() if caller in found}
        self._streams = {rank: caller for rank, caller in self._streams.items() if caller in found}
        self._strangers = {
            caller: self._strangers.get(caller, now_s) for caller in found.keys() - self._peers()
        }
        oldest = sorted(self._strangers, key=self._strangers.__getitem__)
        too_many = max(len(oldest) - self._most, 0)
        for number, caller in enumerate(oldest):
            if number < too_many or now_s > self._strangers[caller] + limits.STRANGER_S:
                probe.shut_down(found[caller], caller)
                self._warn(caller)
        probe.look_away()

    def _warn(self, caller: Caller) -> None:
        if caller.host in self._warned or len(self._warned) >= limits.SHOWN_STRANGERS:
            return
        self._warned.add(caller.host)
        _log.warning(
            "connections from %s are ended, over which no rank has called: they are more than %d, "
            "or older than %g s. Let a firewall admit the hosts of the cluster alone",
            caller.host,
            self._most,
            limits.STRANGER_S,
        )


class _Probe:
    """Looks at sockets of others in this process, under a descriptor of its own.

    gRPC may close a descriptor at any time, and its number may become another file's. So each is
    first duplicated, in place of the last one, which needs no new descriptor.

    Args:
      host: where the server listens, an IP address; if unspecified, on all of the machine.
      port: of the server.
    """

    def __init__(self, host: str, port: int) -> None:
        is_any = ipaddress.ip_address(host).is_unspecified
        self._host = None if is_any else _named(host, port)
        self._port = port
        # of this family there is room for addresses of any other one
        self._spare = socket.socket(socket.AF_UNIX)
        self._socket = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> _Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._spare.close()

    def caller(self, fd: int) -> Caller | None:
        """Who is at the other end of a descriptor; None where it is no connection to the server.

        Args:
          fd: the descriptor, which may be closed meanwhile.
        """
        return self._caller() if self._look_at(fd) else None

    def shut_down(self, fd: int, caller: Caller) -> None:
        """End a connection.

        Args:
          fd: its descriptor.
          caller: who is at the other end of it, unless it is closed meanwhile.
        """
        if self._look_at(fd) and self._caller() == caller:
            with contextlib.suppress(OSError):  # it has ended
                self._socket.shutdown(socket.SHUT_RDWR)

    def lowest_free(self) -> int:
        """The next descriptor that this process gets, about as many as it has."""
        try:
            fd = os.dup(self._spare.fileno())
        except OSError:  # none is left
            return limit()
        os.close(fd)
        return fd

    def look_away(self) -> None:
        """Keep none open: the end of a connection is seen when its last descriptor is closed."""
        os.dup2(self._spare.fileno(), self._socket.fileno(), inheritable=False)

    def _look_at(self, fd: int) -> bool:
        with contextlib.suppress(OSError):  # it is closed
            if stat.S_ISSOCK(os.fstat(fd).st_mode) and fd != self._socket.fileno():
                os.dup2(fd, self._socket.fileno(), inheritable=False)
                return True
        return False

    def _caller(self) -> Caller | None:
        with contextlib.suppress(OSError):  # it listens, or has ended
            own = self._socket.getsockname()
            if isinstance(own, tuple) and isinstance(own[0], str) and self._is_server(*own[:2]):
                host, port, *_ = self._socket.getpeername()
                return _named(host, port)
        return None

    def _is_server(self, host: str, port: int) -> bool:
        return port == self._port and self._host in (None, _named(host, port))


def _caller(address: str) -> Caller | None:
    """A caller from what gRPC says, such as ``ipv4:10.0.0.1:4711`` or ``ipv6:%5B::1%5D:4711``."""
    found = re.fullmatch(r"ipv[46]:\[?([^\]]+)\]?:(\d+)", unquote(address))
    return _named(found[1], int(found[2])) if found else None


def _named(host: str, port: int) -> Caller | None:
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return Caller(str(getattr(ip, "ipv4_mapped", None) or ip), port)
