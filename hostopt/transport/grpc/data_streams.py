"""The streams of frames of one rank, to and from its peers: on data sockets, or in gRPC messages.

Everything here is used on the event loop, unless it says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Coroutine
from typing import Any, Callable

from hostopt.errors import ProtocolError
from hostopt.transport import event_loop, server_sockets
from hostopt.transport.addresses import is_local
from hostopt.transport.frame import FrameReader, FrameWriter, Stream
from hostopt.transport.grpc import limits
from hostopt.transport.grpc.client import RpcClient
from hostopt.transport.grpc.ring import Ring
from hostopt.transport.grpc.runtime import grpc
from hostopt.transport.grpc.server import RpcServer
from hostopt.transport.message import Payload, Tag
from hostopt.transport.tcp import data_server
from hostopt.transport.tcp.data_server import DataServer, HandshakeError
from hostopt.transport.tcp.data_socket import DataSocket
from hostopt.transport.tcp.socket_stream import RECEIVED_ALL, SocketStream, receive_frames

_log = logging.getLogger(__name__)

# Last message of a stream that ends in good order. gRPC alone does not always tell the end of a
# stream from a broken connection.
END_OF_STREAM = b"end"
# Initial metadata with which a peer accepts a stream. A refused stream has empty initial metadata,
# which may arrive before the refusal.
ACCEPTED = ("stream", "accepted")
# Time in which a peer that can be reached accepts a stream. A first attempt to connect may fail on
# a busy machine, and gRPC then waits before the next one.
_ACCEPTED_WITHIN_S = 20.0
# Frames that wait to be written. gRPC writes them one by one, so more frames would only take fresh
# memory, whose page faults cost as much as copying.
_QUEUED_FRAMES = 4

OnBroken = Callable[[int, str], Coroutine[Any, Any, None]]  # called with a peer and the reason


class GrpcStream(Stream):
    """Frames to one peer, written one by one from a short queue, on a `channel` of their own."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        call: Any,
        writer: FrameWriter,
        timeout_s: float,
        on_broken: Callable[[str], Awaitable[None]],
    ) -> None:
        super().__init__(writer, timeout_s)
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()
        self._room = asyncio.Semaphore(_QUEUED_FRAMES)
        self._writing_since_s: float | None = None
        self._channel = channel
        self._call = call
        self._accepted = asyncio.ensure_future(self._is_accepted())
        self._writing = asyncio.ensure_future(self._write())
        self._watcher = asyncio.ensure_future(self._watch(on_broken))

    @property
    def ended(self) -> bool:
        """See `Stream.ended`."""
        return self._watcher.done()

    @property
    def writing_since_s(self) -> float | None:
        """See `Stream.writing_since_s`."""
        return self._writing_since_s

    async def wait_until_open(self, timeout_s: float) -> bool:
        """See `Stream.wait_until_open`."""
        await self._wait_for(self._accepted, timeout_s)
        return self._accepted.done() and self._accepted.result() and not self._call.done()

    async def put(self, tag: Tag, payload: Payload, lazily: bool = False) -> bool:
        """Queues a copy of a message; see `Stream.put`."""
        if not await self._acquire_room():
            return False
        # no await between the two: frames are numbered in the order of the queue
        self._frames.put_nowait(self._writer.write(tag, payload))
        return not self.ended

    async def flush(self) -> None:
        """See `Stream.flush`."""
        if await self._acquire_room():
            self._frames.put_nowait(END_OF_STREAM)
            await asyncio.wait({self._watcher}, timeout=self._timeout_s)

    def cancel(self) -> None:
        """See `Stream.cancel`."""
        self._call.cancel()

    async def close(self) -> None:
        """See `Stream.close`."""
        await super().close()
        await self._channel.close()

    async def _acquire_room(self) -> bool:
        if not self._room.locked():
            await self._room.acquire()
            return True
        room = asyncio.ensure_future(self._room.acquire())
        await self._wait_for(room, self._timeout_s)
        if not room.done():
            room.cancel()
            return False
        return not self.ended

    async def _is_accepted(self) -> bool:
        try:
            return ACCEPTED in tuple(await self._call.initial_metadata())
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            return False

    async def _write(self) -> None:
        message = b""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # see _watch
            while message != END_OF_STREAM:
                message = await self._frames.get()
                self._writing_since_s = begin_s = time.monotonic()
                await self._call.write(message)
                self._writing_since_s = None
                self.written_s += time.monotonic() - begin_s
                self._room.release()
            await self._call.done_writing()

    async def _watch(self, on_broken: Callable[[str], Awaitable[None]]) -> None:
        try:
            await asyncio.wait({self._accepted}, timeout=_ACCEPTED_WITHIN_S)
            if not self._accepted.done():
                await on_broken(f"it has not accepted a stream for {_ACCEPTED_WITHIN_S:g} s")
                self.cancel()
            await self._call
        except grpc.aio.AioRpcError as error:
            # completes before a sender can see that the stream has ended
            await on_broken(error.details() or error.code().name)
        except asyncio.CancelledError:
            pass
        finally:
            self._writing.cancel()


class OutgoingStreams:
    """The streams to the peers, each opened by the first message to its peer."""

    def __init__(self, ring: Ring, client: RpcClient, on_broken: OnBroken) -> None:
        self._ring = ring
        self._peers = ring.peers
        self._client = client
        self._on_broken = on_broken
        has_checksum = ring.options.checksum
        if has_checksum is None:
            # TLS has checksums itself
            has_checksum = not is_local(ring.peers.cluster) and ring.security.tls is None
        self._has_checksum = has_checksum
        self._context = None
        if ring.security.tls is not None and ring.options.uses_data_sockets:
            # its files are read now, and not in the middle of a run
            self._context = ring.security.tls.client_context("the host of a peer")
        self._streams: dict[tuple[int, int], Stream] = {}  # by peer and event loop
        # incarnations whose data port cannot be reached, by this loop
        self._unreachable: set[tuple[str, int]] = set()

    def to(self, peer: int) -> Stream | None:
        """Returns the stream of this event loop to a connected peer; opens it if there is none.

        Returns None if this loop has no data socket, so that loop 0 has to send.
        """
        key = peer, event_loop.current()
        if key not in self._streams:
            target = self._peers.incarnations.get(peer), event_loop.current()
            has_socket = self._peers.data_ports.get(peer, 0) and target not in self._unreachable
            if not has_socket and event_loop.current():
                return None
            self._streams[key] = (self._open_socket if has_socket else self._open_grpc)(peer)
        return self._streams[key]

    async def open_all(self, peer: int, count: int) -> None:
        """Opens this many streams to a peer, so that its first large message does not wait."""

        async def open_() -> None:
            stream = self.to(peer)
            if stream is not None:
                await stream.wait_until_open(limits.HANDSHAKE_S)

        await event_loop.run_on_loops({number: open_() for number in range(count)})

    def all(self, peer: int | None = None) -> list[Stream]:
        """Returns the open streams to all peers or one; may be called from any thread."""
        return [stream for key, stream in list(self._streams.items()) if peer in (None, key[0])]

    def cancel(self, peer: int | None = None) -> None:
        """Cancels the streams to all peers or one."""
        for stream in self.all(peer):
            event_loop.call(stream.loop, stream.cancel)

    def forget(self, peer: int, only: Stream | None = None) -> None:
        """Closes and removes the streams to a peer, or `only` this one of them."""
        for stream in self.all(peer):
            if only in (None, stream):
                del self._streams[peer, stream.loop]
                event_loop.start(stream.close(), stream.loop)

    async def flush(self) -> None:
        """Ends all streams in good order; those of loop 0 end after all others."""
        for is_last in (False, True):
            streams = [each for each in self.all() if (each.loop == 0) is is_last]
            await asyncio.gather(*(event_loop.run_on(each.loop, each.flush()) for each in streams))

    async def close(self) -> None:
        """Closes all streams."""
        await asyncio.gather(*(event_loop.run_on(each.loop, each.close()) for each in self.all()))

    def blocked(self) -> dict[int, float]:
        """Returns the monotonic start of the oldest write in progress, by peer; on any thread."""
        blocked: dict[int, float] = {}
        for (peer, _), stream in list(self._streams.items()):
            since_s = stream.writing_since_s
            if since_s is not None:
                blocked[peer] = min(since_s, blocked.get(peer, since_s))
        return blocked

    def _writer(self) -> FrameWriter:
        return FrameWriter(self._peers.origin(self._peers.rank), self._has_checksum)

    async def _report(self, peer: int, reason: str) -> None:
        await event_loop.run_on(0, self._on_broken(peer, reason))

    def _open_grpc(self, peer: int) -> Stream:
        channel, call = self._client.open_stream(peer)
        timeout_s = self._ring.options.collective_timeout_s
        on_broken = functools.partial(self._report, peer)
        return GrpcStream(channel, call, self._writer(), timeout_s, on_broken)

    def _open_socket(self, peer: int) -> Stream:
        peers, incarnation = self._peers, self._peers.incarnations[peer]
        address = peers.data_address(peer, event_loop.current())

        def on_unreachable(reason: str) -> None:
            mailbox = self._ring.mailbox
            is_known = any(each == incarnation for each, _ in self._unreachable)
            self._unreachable.add((incarnation, stream.loop))
            self.forget(peer, stream)  # the next one is in gRPC messages, or that of loop 0
            if is_known or mailbox.error is not None or mailbox.has_left(peer):
                return
            _log.warning(
                "rank %d cannot reach the data port of %s at %s: %s. Data goes over %s, which "
                "is slower. Open the ports of the ranks to each other, correct "
                "HOSTOPT_INTERFACES, or set communication='grpc'",
                peers.rank,
                peers.cluster.describe(peer),
                address,
                reason,
                "fewer streams" if stream.loop else "gRPC",
            )

        stream = SocketStream(
            lambda: self._connect(peer, address),
            self._writer(),
            self._ring.options.collective_timeout_s,
            on_unreachable,
            functools.partial(self._report, peer),
        )
        return stream

    async def _connect(self, peer: int, address: str) -> DataSocket:
        peers, options = self._peers, self._ring.options
        connecting = data_server.connect(
            address,
            peers.local,
            peers.identity(peer),
            self._ring.security,
            self._context,
            event_loop.current(),
        )
        shortest_s = min(options.collective_timeout_s, options.rendezvous_timeout_s)
        return await asyncio.wait_for(connecting, min(limits.HANDSHAKE_S, shortest_s / 2))


class IncomingStreams:
    """The streams from the peers, at most one of each for each event loop."""

    def __init__(self, ring: Ring, server: RpcServer, on_broken: OnBroken) -> None:
        self._ring = ring
        self._peers = peers = ring.peers
        self._server = server
        self._on_broken = on_broken
        self._open: set[tuple[int, int]] = set()  # peers and loops whose stream is open
        self._data_server = DataServer(
            peers.local,
            peers.incarnations.get,
            ring.security,
            limits.HANDSHAKE_S,
            limits.most_strangers(peers.cluster.size),
            self._receive,
        )

    def listen(self) -> None:
        """Opens the data port if the option `communication` allows one."""
        if not self._ring.options.uses_data_sockets:
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
        server_sockets.closed_in_children.add(self._data_server.port)

    async def stop(self, grace_s: float) -> None:
        """Closes the data port; peers have `grace_s` for their last frames."""
        await self._data_server.stop(grace_s)
        server_sockets.closed_in_children.discard(self._data_server.port)

    async def on_stream(self, _: object, context: grpc.aio.ServicerContext) -> bytes:
        """Receives the frames of a peer in gRPC messages until its stream ends."""
        peer = await self._server.admit_stream(context)
        code = grpc.StatusCode
        if (peer, 0) in self._open:
            await context.abort(code.ALREADY_EXISTS, f"rank {peer} has a stream already")
        if not self._server.strangers.add_stream(context.peer(), peer):
            await context.abort(code.UNAVAILABLE, "this connection was taken for a stranger's")
        reader = FrameReader(self._peers.origin(peer))
        self._open.add((peer, 0))
        reason = "connection reset"
        try:
            await context.send_initial_metadata((ACCEPTED,))  # the peer waits for it
            while (data := await context.read()) is not grpc.aio.EOF:
                if data == END_OF_STREAM:
                    self._ring.mailbox.mark_left(peer)
                elif (message := reader.read(data)) is not None:
                    self._ring.mailbox.put(peer, *message)
        except ProtocolError as error:
            self._abort_on_bad_frame(peer, error)
        except (Exception, asyncio.CancelledError) as error:  # depends on how the connection broke
            reason = str(error) or reason
        finally:
            self._open.discard((peer, 0))
        # Does nothing after END_OF_STREAM. The shield is needed as gRPC may cancel this call now.
        await asyncio.shield(self._on_broken(peer, reason))
        return b""

    async def _receive(self, connection: DataSocket, peer: int, stream: int) -> None:
        self._check_is_closed(peer, stream)
        await asyncio.wait_for(data_server.accept(connection), limits.HANDSHAKE_S)
        self._check_is_closed(peer, stream)
        self._open.add((peer, stream))
        reason = "connection reset"
        try:
            if await event_loop.run_on(stream, self._read_frames(connection, peer)):
                return
        except ProtocolError as error:
            self._abort_on_bad_frame(peer, error)
        except OSError as error:
            reason = str(error) or reason
        except Exception as error:  # of this rank, such as a lack of memory
            self._ring.abort(error)
        finally:
            self._open.discard((peer, stream))
        await self._on_broken(peer, reason)

    async def _read_frames(self, connection: DataSocket, peer: int) -> bool:
        """Reads frames to the end; returns False if the ring is aborted before it."""
        connection = connection.on_this_loop()
        try:
            reader = FrameReader(self._peers.origin(peer))
            most_bytes = limits.most_message_bytes(self._ring.options)
            if not await receive_frames(connection, reader, self._ring.mailbox, peer, most_bytes):
                return False
            if event_loop.current() == 0:  # the peer ends its other streams before
                self._ring.mailbox.mark_left(peer)
            await connection.write([RECEIVED_ALL])
            return True
        finally:
            connection.close()

    def _check_is_closed(self, peer: int, stream: int) -> None:
        if stream >= self._peers.most_streams:
            raise HandshakeError(f"rank {peer} opens stream {stream}, which is too many")
        if (peer, stream) in self._open:
            raise HandshakeError(f"rank {peer} has a stream already")

    def _abort_on_bad_frame(self, peer: int, error: ProtocolError) -> None:
        cluster, rank = self._peers.cluster, self._peers.rank
        self._ring.abort(
            ProtocolError(
                f"{cluster.describe(peer)} sent data to rank {rank} ({cluster.ring[rank]}) that "
                f"cannot be used: {error}",
                **cluster.attributes(peer, step=error.step, bucket=error.bucket),
                root_cause=str(error),
            )
        )
