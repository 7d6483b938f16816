"""Messages over gRPC: one stream of frames to each rank that this rank sends to.

Each rank is a server at its own address and a client of its peers; docs/wire.md lists the calls.
To a peer that a rank sends to, it has other connections for frames: data sockets
(`hostopt.transport.tcp`), or a Stream. Everything but data sockets runs on event loop 0; other
threads hand work over to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import AsyncIterator, Sequence

from hostopt.cluster.cluster import Cluster
from hostopt.errors import AuthError, CollectiveTimeoutError, HostOptError, PeerLostError
from hostopt.options import Options
from hostopt.process.child_process import call_at_exit, cancel_at_exit
from hostopt.transport import event_loop
from hostopt.transport.base import Transport
from hostopt.transport.frame import Stream
from hostopt.transport.grpc import ring as ring_
from hostopt.transport.grpc.client import RpcClient
from hostopt.transport.grpc.data_streams import IncomingStreams, OutgoingStreams
from hostopt.transport.grpc.liveness import Departure, Liveness
from hostopt.transport.grpc.notes import STATUS_REQUEST, read_note
from hostopt.transport.grpc.observer import Observation
from hostopt.transport.grpc.rendezvous import Rendezvous
from hostopt.transport.grpc.ring import Peers, Ring, data_hosts, stream_count
from hostopt.transport.grpc.runtime import grpc, keep_freed_memory
from hostopt.transport.grpc.server import RpcServer
from hostopt.transport.message import Payload, Tag
from hostopt.transport.overview import Details, details_of
from hostopt.transport.security import Security
from hostopt.transport.stall import Status


class GrpcTransport(Transport):
    """One rank of a ring over gRPC. The constructor returns once all peers are connected."""

    def __init__(self, cluster: Cluster, options: Options, service: str = "hostopt.Ring") -> None:
        super().__init__(cluster, options)
        keep_freed_memory()
        self._ending = threading.RLock()  # held while the ring is aborted or closed
        self._closed = False
        self._pid = os.getpid()
        security = Security(cluster, options)
        self._peers = peers = Peers(
            cluster, stream_count(cluster, options), data_hosts(cluster, options)
        )
        self._ring = ring = Ring(
            peers, self.options, security, ring_.DEFAULT, self.mailbox, self.abort
        )
        self._client = client = RpcClient(ring, service)
        self._server = RpcServer(ring)
        self._streams = streams = OutgoingStreams(ring, client, self._on_broken)
        self._incoming = IncomingStreams(ring, self._server, self._on_broken)
        self._liveness = Liveness(ring, client, streams, self.recorder)
        self._departure = Departure(ring, client, streams)
        self._rendezvous = Rendezvous(ring, client, streams, self._liveness)
        self._observation = Observation(ring, client, self._details)

        self.mailbox.on_failure(lambda _: event_loop.start(self._drop_streams()))
        event_loop.run(self._serve(service))
        call_at_exit(self.close)
        try:
            event_loop.run(self._rendezvous.run())
            self.streams = peers.streams
            if self.streams > 1:
                event_loop.run(streams.open_all(peers.successor, self.streams))
        except BaseException as error:
            self.abort(error)
            if isinstance(error, AuthError):
                event_loop.run(asyncio.sleep(ring.timing.auth_linger_s))
            self.close()
            raise

    async def _serve(self, service: str) -> None:
        self._client.open()
        self._incoming.listen()
        try:
            await self._server.start(
                service,
                self._incoming.on_stream,
                self._observation.on_observe,
                Hello=self._rendezvous.on_hello,
                Status=self._on_status,
                Details=self._observation.on_details,
                Leave=self._departure.on_leave,
            )
        except BaseException:
            await self._incoming.stop(0)
            raise

    async def _on_broken(self, peer: int, reason: str) -> None:
        await self._liveness.stream_broken(peer, reason)

    # -- sending ---------------------------------------------------------------------------

    async def send(
        self, peer: int, tag: Tag, payload: Payload, name: str = "", lazily: bool = False
    ) -> None:
        """See `Transport.send`."""
        if self.error is not None:
            raise self.error
        if self._closed:
            raise PeerLostError(
                "this rank has left the ring", **self.cluster.attributes(self.rank)
            )
        tried = None
        while (stream := self._streams.to(peer)) is not tried or stream is None:
            if stream is None:
                return await event_loop.run_on(0, self.send(peer, tag, payload, name))
            if await stream.put(tag, payload, lazily):
                self._count(len(payload))
                return None
            tried = stream  # it is replaced if a port cannot be reached
        raise self._send_error(stream, peer, tag, name)

    @contextlib.asynccontextmanager
    async def sending(self, peer: int, tag: Tag, name: str = "") -> AsyncIterator[None]:
        """See `Transport.sending`."""
        try:
            yield
        except BaseException:
            for stream in self._streams.all(peer):
                if stream.loop == event_loop.current():
                    stream.copy_rest()
            raise
        last = self._streams.to(peer)
        if last is not None and not await last.has_written():
            raise self._send_error(last, peer, tag, name)

    async def send_marker(self, peer: int, marker: Tag, name: str = "") -> None:
        """See `Transport.send_marker`. Each stream carries one, and the number of the others."""
        loops = {0, *(stream.loop for stream in self._streams.all(peer))}
        marker = marker._replace(chunk=len(loops) - 1)
        for loop in loops:
            await event_loop.run_on(loop, self.send(peer, marker, b"", name))

    def _send_error(self, stream: Stream, peer: int, tag: Tag, name: str) -> HostOptError:
        """Aborts the ring as a stream has failed, and returns the error of all ranks."""
        peer_name = self.cluster.describe(peer)
        attributes = self.cluster.attributes(peer, step=tag.step, bucket=tag.bucket)
        error: HostOptError
        if stream.ended or self.mailbox.has_left(peer):
            error = PeerLostError(
                f"{peer_name} has left while rank {self.rank} wanted to send {name or 'data'} at "
                f"{tag}. Give all ranks the same number of steps",
                **attributes,
            )
        else:
            error = CollectiveTimeoutError(
                f"{peer_name} has taken no data from rank {self.rank} for "
                f"{self.options.collective_timeout_s:g} s, at {tag} of {name or 'data'}. Check "
                "what it is doing, or raise collective_timeout_s",
                **attributes,
                root_cause=f"{peer_name} makes no progress",
            )
        self.abort(error)
        return self.error or error

    def blocked_sends(self) -> dict[int, float]:
        """See `Transport.blocked_sends`."""
        return self._streams.blocked()

    def send_time_s(self) -> float:
        """See `Transport.send_time_s`."""
        return sum(stream.written_s for stream in self._streams.all())

    # -- status ----------------------------------------------------------------------------

    async def _on_status(self, request: bytes, _: grpc.aio.ServicerContext) -> bytes:
        """Answers a Status call; the request may name a message or be empty."""
        try:
            message = read_note(request, self._peers.most_note_bytes, STATUS_REQUEST)
            status = self.status_for(message["waiting"], message["tag"])
        except ValueError:
            status = self.status()
        return json.dumps({"incarnation": self._peers.incarnation, **status}).encode()

    def _details(self) -> Details:
        return details_of(self, () if self._peers.connected else self._peers.missing)

    async def request_status(self, peer: int, waiting: int, tag: Sequence[int]) -> Status | None:
        """See `Transport.request_status`."""
        if peer == self.rank:
            return self.status_for(waiting, tag)
        return await self._liveness.request_status(peer, waiting=waiting, tag=tag)

    # -- end -------------------------------------------------------------------------------

    def _abort(self, error: HostOptError) -> None:
        if os.getpid() != self._pid:  # a child of fork(), which has no event loop
            return
        with self._ending:
            if not self._closed and self.mailbox.fail(error):
                self._departure.send_error(error)

    def close(self) -> None:
        """See `Transport.close`."""
        if os.getpid() != self._pid:  # a child of fork(), which has no event loop
            return
        with self._ending:
            if self._closed:
                return
            self._closed = self._liveness.closed = True
        cancel_at_exit(self.close)
        event_loop.run(self._close())
        self._wait_for_dump()

    async def _close(self) -> None:
        timeout_s = self._ring.timing.leave_timeout_s
        if self.error is None:
            await self._streams.flush()
            await self._departure.send_goodbye()
        await self._departure.wait_until_sent()
        self._liveness.stop()
        self._server.stop_guard()
        closing = [self._streams.close()]
        closing += [channel.close() for channel in self._client.channels.values()]
        closed = [asyncio.ensure_future(each) for each in closing]
        await asyncio.wait(closed, timeout=timeout_s)
        grace_s = timeout_s if self.error is None else 0
        await self._incoming.stop(grace_s)
        await self._server.stop(grace_s)  # peers end their streams

    async def _drop_streams(self) -> None:
        await asyncio.sleep(self._ring.timing.drop_after_s)  # until the peers have the error
        self._streams.cancel()
