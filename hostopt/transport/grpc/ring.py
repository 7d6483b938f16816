"""The ring as one rank knows it: its peers, its mailbox, and the times that are not options.

Each start of a rank is another *incarnation*, a random number.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable

from hostopt.cluster.cluster import Cluster, core_count
from hostopt.errors import AuthError, ConfigError
from hostopt.options import Options
from hostopt.transport.addresses import address_of_interface, host_and_port, is_loopback
from hostopt.transport.frame import Origin
from hostopt.transport.grpc.limits import most_note_bytes
from hostopt.transport.mailbox import Mailbox
from hostopt.transport.security import Identity, Security

INCARNATION = re.compile("[0-9a-f]{1,16}")
# By default a rank has a stream for two cores, up to this number.
_CORES_OF_A_STREAM, _STREAMS = 2, 4


@dataclass(frozen=True)
class Timing:
    """Deadlines and intervals, in seconds; docs/wire.md lists them."""

    keepalive_s: float = 10.0  # silence of a peer after which gRPC pings it
    ping_timeout_s: float = 15.0
    hello_timeout_s: float = 1.0
    retry_after_s: float = 0.05  # before a peer that is not ready is called again
    progress_every_s: float = 10.0  # between warnings that name the missing ranks
    status_timeout_s: float = 1.0
    details_timeout_s: float = 2.0
    last_message_s: float = 0.5  # for a Leave message, before its sender is declared lost
    auth_linger_s: float = 2.5  # after an `AuthError`, so that the peers detect it as well
    drop_after_s: float = 0.1  # between an abort and the cancellation of streams
    leave_timeout_s: float = 2.0  # for peers to take the last frames and Leave messages


DEFAULT = Timing()


class Peers:
    """The peers of one rank; used on the event loop."""

    def __init__(self, cluster: Cluster, streams: int = 1, data_hosts: Sequence[str] = ()) -> None:
        assert cluster.rank is not None
        self.most_streams = streams  # that this rank can use
        self.data_hosts = list(data_hosts)  # of this rank; empty for the one of its address
        self._streams_of: dict[int, int] = {}  # that the connected peers can use
        self.cluster = cluster
        self.rank = cluster.rank
        self.successor = (cluster.rank + 1) % cluster.size
        self.incarnation = secrets.token_hex(8)
        self.local = Identity(self.rank, self.incarnation)
        self.incarnations: dict[int, str] = {}  # of the connected peers
        self.data_port = 0  # of this rank; 0 if it has no data server
        self.data_ports: dict[int, int] = {}  # of the connected peers
        self._data_hosts: dict[int, list[str]] = {}  # of the connected peers
        self.missing = set(range(cluster.size)) - {cluster.rank}
        self.reasons: dict[int, str] = {}  # why a peer that answers is still missing
        self.gone: set[int] = set()  # peers that have left, or whose process is gone
        self.connected = False  # True once the rendezvous is complete
        self.most_note_bytes = most_note_bytes(cluster.size)

    def __contains__(self, rank: int) -> bool:
        return 0 <= rank < self.cluster.size and rank != self.rank

    def origin(self, rank: int) -> Origin:
        """Returns the origin that the frames of this rank or of a connected peer carry."""
        ring = json.dumps([str(task) for task in self.cluster.ring])
        incarnation = self.incarnation if rank == self.rank else self.incarnations[rank]
        return Origin(zlib.crc32(ring.encode()), int(incarnation, 16))

    def identity(self, peer: int) -> Identity:
        """Returns the identity of a peer; its incarnation is empty if it is not connected."""
        return Identity(peer, self.incarnations.get(peer, ""))

    def add(self, peer: int, hello: dict[str, Any]) -> None:
        """Notes what a peer says of itself."""
        self.incarnations[peer] = hello["incarnation"]
        self.data_ports[peer] = hello["data_port"]
        self._data_hosts[peer] = hello["data_hosts"]
        self._streams_of[peer] = hello["data_streams"]

    def data_address(self, peer: int, stream: int) -> str:
        """Returns the address of a connected peer for one of the streams to it."""
        hosts = self._data_hosts[peer] or [host_and_port(self.cluster.ring[peer].address)[0]]
        return f"{hosts[stream % len(hosts)]}:{self.data_ports[peer]}"

    @property
    def streams(self) -> int:
        """Number of streams that this rank and all connected peers can use."""
        return min([self.most_streams, *self._streams_of.values()])

    def is_restarted(self, peer: int, incarnation: str) -> bool:
        """Returns True if a connected peer had another incarnation than this one."""
        return self.incarnations.get(peer, incarnation) != incarnation

    def forget(self, peer: int) -> None:
        """Marks a peer as missing again."""
        self.incarnations.pop(peer, None)
        self._streams_of.pop(peer, None)
        self.missing.add(peer)
        self.gone.discard(peer)

    def missing_names(self) -> str:
        """Returns the missing peers as text, with the reasons that are known."""
        names = []
        for peer in sorted(self.missing):
            task, reason = self.cluster.ring[peer], self.reasons.get(peer)
            names.append(f"{task.name} ({task.address})" + (f", which {reason}" if reason else ""))
        return ", ".join(names)


def data_hosts(cluster: Cluster, options: Options) -> list[str]:
    """Returns the addresses of the interfaces by which the peers reach this rank's data port."""
    assert cluster.rank is not None
    if is_loopback(cluster.ring[cluster.rank].address):
        return []  # all its peers are on this host
    hosts = []
    for name in _interfaces(options):
        try:
            hosts.append(address_of_interface(name))
        except OSError as error:
            found = ", ".join(each for _, each in socket.if_nameindex())
            raise ConfigError(
                f"option interfaces names {name!r}, but this host has no such interface with an "
                f"IPv4 address, only {found} ({error}). Name interfaces of this host, in the same "
                "order of networks on all ranks"
            ) from error
    return hosts


def _interfaces(options: Options) -> list[str]:
    return options.interfaces.split(",") if options.interfaces else []


def stream_count(cluster: Cluster, options: Options) -> int:
    """Returns how many streams of data a rank can use: by default by the cores that it has."""
    if not options.uses_data_sockets or cluster.size == 1:
        return 1
    if options.streams:
        return options.streams
    served = max(1, min(core_count(cluster) // _CORES_OF_A_STREAM, _STREAMS))
    lines = max(1, len(_interfaces(options)))
    return -(-served // lines) * lines  # the same number on each


@dataclass(frozen=True)
class Ring:
    """The ring as one rank sees it."""

    peers: Peers
    options: Options
    security: Security
    timing: Timing
    mailbox: Mailbox  # also has the error of the ring, and the peers that have left
    abort: Callable[[BaseException], None]

    def is_peer(self, claim: Identity) -> bool:
        """Returns True if the claim of an accepted call is true. A token has proved it."""
        incarnation = self.peers.incarnations.get(claim.rank)
        return self.security.has_token or claim.incarnation == incarnation

    def auth_error(self, rank: int, fault: str) -> AuthError:
        """Builds the error of a rank that may not be in the ring; `fault` is a predicate."""
        cluster = self.peers.cluster
        fault = f"{cluster.describe(rank)} {fault}"
        return AuthError(
            f"{fault}. Found by {cluster.describe(self.peers.rank)}. Give all ranks the same "
            "token, in token_file or HOSTOPT_TOKEN, and each a tls_dir with a valid certificate "
            "of the same CA, or none of them any",
            **cluster.attributes(rank),
            root_cause=fault,
        )
