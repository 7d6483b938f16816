"""Receives the frames of the peers: from data sockets, or in gRPC messages."""

from __future__ import annotations

import asyncio
import logging

from hostopt.errors import ProtocolError
from hostopt.options import Options
from hostopt.transport.frame import FrameReader
from hostopt.transport.grpc import forked, limits
from hostopt.transport.grpc.grpc_stream import ACCEPTED, END_OF_STREAM
from hostopt.transport.grpc.liveness import Liveness
from hostopt.transport.grpc.ring_context import RingContext
from hostopt.transport.grpc.runtime import grpc
from hostopt.transport.grpc.server import RpcServer
from hostopt.transport.security import Security
from hostopt.transport.tcp import handshake
from hostopt.transport.tcp.data_server import DataServer
from hostopt.transport.tcp.data_socket import DataSocket
from hostopt.transport.tcp.frame_receiver import FrameReceiver
from hostopt.transport.tcp.handshake import Identity
from hostopt.transport.tcp.socket_stream import RECEIVED_ALL

_log = logging.getLogger(__name__)

_HAS_LEFT = "it has closed its communicator"


class IncomingStreams:
    """The streams to one rank, at most one of each peer; used on the event loop."""

    def __init__(
        self,
        ring: RingContext,
        server: RpcServer,
        liveness: Liveness,
        security: Security,
        options: Options,
    ) -> None:
        self._peers = peers = ring.peers
        self._mailbox = ring.mailbox
        self._abort = ring.abort
        self._server = server
        self._liveness = liveness
        self._options = options
        self._open: set[int] = set()  # peers whose stream is open
        self._data_server = DataServer(
            Identity(peers.rank, peers.incarnation),
            peers.incarnations.get,
            security,
            limits.HANDSHAKE_S,
            limits.most_strangers(peers.cluster.size),
            self._receive,
        )

    def listen(self) -> None:
        """Opens the data port if the option `communication` allows one."""
        if not self._options.uses_data_sockets:
            return
        try:
            self._data_server.start(self._peers.cluster.ring[self._peers.rank].address)
        except OSError as error:
            _log.warning(
                "rank %d has no data port (%s): data to it goes over gRPC, which is slower",
                self._peers.rank,
                error,
            )
            return
        self._peers.data_port = self._data_server.port
        forked.keep_from_children(self._data_server.port)

    async def stop(self, grace_s: float) -> None:
        """Closes the data port; peers have `grace_s` for their last frames."""
        await self._data_server.stop(grace_s)
        forked.forget(self._data_server.port)

    async def on_stream(self, _: object, context: grpc.aio.ServicerContext) -> bytes:
        """Receives the frames of a peer in gRPC messages until its stream ends."""
        peer = await self._server.admit_stream(context)
        if peer in self._open:
            await context.abort(
                grpc.StatusCode.ALREADY_EXISTS, f"rank {peer} has a stream already"
            )
        if not self._server.strangers.add_stream(context.peer(), peer):
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, "this connection was taken for a stranger's"
            )
        reader = FrameReader(self._peers.origin(peer))
        self._open.add(peer)
        reason = "connection reset"
        try:
            await context.send_initial_metadata((ACCEPTED,))  # the peer waits for it
            while (data := await context.read()) is not grpc.aio.EOF:
                if data == END_OF_STREAM:
                    self._mailbox.mark_left(peer, _HAS_LEFT)
                elif (message := reader.read(data)) is not None:
                    self._mailbox.put(peer, *message)
        except ProtocolError as error:
            self._abort_on_bad_frame(peer, error)
        except (Exception, asyncio.CancelledError) as error:  # depends on how the connection broke
            reason = str(error) or reason
        finally:
            self._open.discard(peer)
        # Does nothing after END_OF_STREAM. The shield is needed as gRPC may cancel this call now.
        await asyncio.shield(self._liveness.stream_broken(peer, reason))
        return b""

    async def _receive(self, connection: DataSocket, peer: int) -> None:
        """Receives the frames of a peer from a data socket until its stream ends."""
        self._check_is_closed(peer)
        await asyncio.wait_for(handshake.accept(connection), limits.HANDSHAKE_S)
        self._check_is_closed(peer)
        self._open.add(peer)
        reason = "connection reset"
        try:
            reader = FrameReader(self._peers.origin(peer))
            most_bytes = limits.most_message_bytes(self._options)
            if await FrameReceiver(connection, reader, self._mailbox, peer, most_bytes).run():
                self._mailbox.mark_left(peer, _HAS_LEFT)
                await connection.write([RECEIVED_ALL])
        except ProtocolError as error:
            self._abort_on_bad_frame(peer, error)
        except OSError as error:
            reason = str(error) or reason
        except Exception as error:  # of this rank, such as a lack of memory
            self._abort(error)
        finally:
            self._open.discard(peer)
            connection.close()
        await self._liveness.stream_broken(peer, reason)

    def _check_is_closed(self, peer: int) -> None:
        if peer in self._open:
            raise handshake.HandshakeError(f"rank {peer} has a stream already")

    def _abort_on_bad_frame(self, peer: int, error: ProtocolError) -> None:
        cluster, rank = self._peers.cluster, self._peers.rank
        attributes = {**cluster.attributes(peer), "step": error.step, "bucket": error.bucket}
        self._abort(
            ProtocolError(
                f"{cluster.describe(peer)} sent data to rank {rank} ({cluster.ring[rank]}) that "
                f"cannot be used: {error}",
                **attributes,
                root_cause=str(error),
            )
        )
