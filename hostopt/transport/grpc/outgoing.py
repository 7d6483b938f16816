"""Opens the streams of one rank: on data sockets, or in gRPC messages."""

from __future__ import annotations

import asyncio
import logging

from hostopt.options import Options
from hostopt.transport.addresses import host_and_port
from hostopt.transport.frame import FrameWriter
from hostopt.transport.grpc import limits
from hostopt.transport.grpc.client import RpcClient
from hostopt.transport.grpc.grpc_stream import GrpcStream
from hostopt.transport.grpc.liveness import Liveness
from hostopt.transport.grpc.peers import Peers
from hostopt.transport.security import Security
from hostopt.transport.stream import Stream, Streams
from hostopt.transport.tcp import data_server
from hostopt.transport.tcp.data_socket import DataSocket
from hostopt.transport.tcp.handshake import Identity
from hostopt.transport.tcp.socket_stream import SocketStream

_log = logging.getLogger(__name__)


class StreamOpener:
    """Opens the stream to a peer; used on the event loop.

    Args:
      checksum: True if the checksum of a frame covers its payload.
    """

    def __init__(
        self,
        peers: Peers,
        client: RpcClient,
        security: Security,
        options: Options,
        checksum: bool,
    ) -> None:
        self._peers = peers
        self._client = client
        self._security = security
        self._timeout_s = options.collective_timeout_s
        self._connect_timeout_s = min(
            limits.HANDSHAKE_S, options.collective_timeout_s / 2, options.rendezvous_timeout_s / 2
        )
        self._checksum = checksum
        self._context = None
        if security.tls is not None and options.uses_data_sockets:
            # its files are read now, and not in the middle of a run
            self._context = security.tls.client_context("the host of a peer")
        self._unreachable: set[str] = set()  # incarnations whose data port cannot be reached

    def open(self, peer: int, streams: Streams, liveness: Liveness) -> Stream:
        """Opens the stream to a connected peer.

        Args:
          streams: forgets a stream that is to be replaced by one in gRPC messages.
        """
        writer = FrameWriter(self._peers.origin(self._peers.rank), self._checksum)

        async def on_broken(reason: str) -> None:
            await liveness.stream_broken(peer, reason)

        port, incarnation = self._peers.data_ports.get(peer, 0), self._peers.incarnations[peer]
        if not port or incarnation in self._unreachable:
            channel, call = self._client.open_stream(peer)
            return GrpcStream(channel, call, writer, self._timeout_s, on_broken)
        host, _ = host_and_port(self._peers.cluster.ring[peer].address)
        address = f"{host}:{port}"

        def on_unreachable(reason: str) -> None:
            _log.warning(
                "rank %d cannot reach the data port of %s at %s: %s. Data goes over gRPC, which "
                "is slower. Open the ports of the ranks to each other, or set "
                "communication='grpc'",
                self._peers.rank,
                self._peers.cluster.describe(peer),
                address,
                reason,
            )
            self._unreachable.add(incarnation)
            streams.forget(peer, stream)

        stream = SocketStream(
            lambda: self._connect(peer, address),
            writer,
            self._timeout_s,
            on_unreachable,
            on_broken,
        )
        return stream

    async def _connect(self, peer: int, address: str) -> DataSocket:
        peers = self._peers
        caller = Identity(peers.rank, peers.incarnation)
        called = Identity(peer, peers.incarnations[peer])
        connecting = data_server.connect(address, caller, called, self._security, self._context)
        return await asyncio.wait_for(connecting, self._connect_timeout_s)
