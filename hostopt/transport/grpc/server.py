"""The server of one rank: it accepts calls of peers and refuses all others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from typing import Any, Callable

from hostopt.errors import ConfigError
from hostopt.options import Options
from hostopt.process import descriptors
from hostopt.transport import server_sockets
from hostopt.transport.addresses import listen_address
from hostopt.transport.grpc import limits
from hostopt.transport.grpc.client import message_options
from hostopt.transport.grpc.ring import Ring, Timing
from hostopt.transport.grpc.runtime import grpc, keep_aio_running
from hostopt.transport.grpc.strangers import Strangers
from hostopt.transport.security import (
    MAX_RANK_DIGITS,
    Authenticator,
    Caller,
    claim_of,
    read_metadata,
)

_log = logging.getLogger(__name__)

OBSERVE = "Observe"  # the method of observers
Handler = Callable[[bytes, grpc.aio.ServicerContext], Awaitable[bytes]]


def server_options(options: Options, timing: Timing, size: int) -> list[tuple[str, int]]:
    """Returns `message_options` and the limits of a server's callers."""
    sent_bytes = max(limits.most_message_bytes(options), limits.most_overview_bytes(size))
    return [
        ("grpc.max_send_message_length", sent_bytes),  # gRPC uses the first of two equal options
        *message_options(options, timing),
        ("grpc.server_handshake_timeout_ms", int(1e3 * limits.HANDSHAKE_S)),
        (
            "grpc.max_allowed_incoming_connections",
            limits.most_connections(size, descriptors.limit()),
        ),
        ("grpc.max_concurrent_streams", limits.CALLS_OF_A_CONNECTION),
        ("grpc.max_metadata_size", limits.HEADER_BYTES),
        ("grpc.absolute_max_metadata_size", limits.MOST_HEADER_BYTES),
    ]


class RpcServer:
    """Answers the calls of peers; used on the event loop."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._peers = ring.peers
        self._authenticator = Authenticator(ring.peers.local, ring.security)
        self._observers = Authenticator(ring.peers.local, ring.security, True)
        self._refused_hosts: set[str] = set()
        self._unknown: asyncio.Semaphore  # made on the event loop
        self._server: grpc.aio.Server | None = None
        self._port = 0
        self._guard: asyncio.Future[None] | None = None
        self.strangers = Strangers(ring.peers.cluster.size, ring.is_peer)

    async def start(
        self, service: str, on_stream: Any, on_observe: Handler, **handlers: Handler
    ) -> None:
        """Listens at this rank's address; `on_stream` calls `admit_stream` first."""
        cluster = self._peers.cluster
        self._unknown = asyncio.Semaphore(limits.UNKNOWN_REQUESTS)
        keep_aio_running()
        self._server = grpc.aio.server(
            options=server_options(self._ring.options, self._ring.timing, cluster.size)
        )
        ranks = self._authenticator
        methods = {name: self._method(name, ranks, each) for name, each in handlers.items()}
        methods[OBSERVE] = self._method(OBSERVE, self._observers, on_observe)
        methods["Stream"] = grpc.stream_unary_rpc_method_handler(on_stream)
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, methods)]
        )
        task = cluster.ring[self._peers.rank]
        address = listen_address(task.address)
        self._port = self._bind(self._server, address)
        if not self._port:
            descriptors.check_room()
            raise ConfigError(
                f"address {task.address} of this task ({task.name}) is in use or not of this "
                "machine. End the process that listens there (is this task already running?) or "
                "choose another port in TF_CONFIG on all ranks",
                **cluster.attributes(self._peers.rank),
            )
        server_sockets.closed_in_children.add(self._port)
        await self._server.start()
        self._guard = asyncio.ensure_future(self.strangers.watch(address, self._port))

    def _bind(self, server: grpc.aio.Server, address: str) -> int:
        try:
            if (tls := self._ring.security.tls) is None:
                return int(server.add_insecure_port(address))
            pair = [(tls.key, tls.cert)]
            credentials = grpc.ssl_server_credentials(pair, tls.ca, require_client_auth=True)
            return int(server.add_secure_port(address, credentials))
        except RuntimeError:  # older releases of gRPC return 0 instead
            return 0

    def stop_guard(self) -> None:
        """Stops looking for connections of strangers."""
        if self._guard is not None:
            self._guard.cancel()

    async def stop(self, grace_s: float) -> None:
        """Stops the server; open calls have `grace_s` to end."""
        if self._server is not None:
            stopped = self._server.stop(grace_s)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stopped, 2 * self._ring.timing.leave_timeout_s)
        server_sockets.closed_in_children.discard(self._port)

    def _method(
        self, name: str, authenticator: Authenticator, handler: Handler
    ) -> grpc.RpcMethodHandler:
        async def handle(_: Any, context: grpc.aio.ServicerContext) -> bytes:
            caller = await self._admit(name, authenticator, context)
            request = await self._read(caller, context)
            answer = await handler(request, context)
            metadata = authenticator.answer_metadata(name, caller, answer)
            if metadata:
                context.set_trailing_metadata(metadata)
            return answer

        # as a stream, since gRPC would read a single request before `_admit` is called
        return grpc.stream_unary_rpc_method_handler(handle)

    async def admit_stream(self, context: grpc.aio.ServicerContext) -> int:
        """Returns the peer that starts a stream; ends the call of anybody else."""
        caller = await self._admit("Stream", self._authenticator, context)
        code = grpc.StatusCode
        claim = claim_of(caller)
        if claim.rank not in self._peers:
            await context.abort(code.INVALID_ARGUMENT, "this is not a rank of this ring")
        incarnation = self._peers.incarnations.get(claim.rank)
        is_here = caller.get("to") == self._peers.incarnation
        if not is_here or caller.get("from") != incarnation:
            await context.abort(code.NOT_FOUND, "this rank is of another ring")
        return claim.rank

    async def _admit(
        self, method: str, authenticator: Authenticator, context: grpc.aio.ServicerContext
    ) -> Caller:
        """Returns the metadata of an acceptable call; ends every other call."""
        caller = read_metadata(context.invocation_metadata())
        if authenticator.needs_challenge(caller):
            rank = (("rank", str(self._peers.rank)),)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, self._peers.incarnation, rank)
        reason = authenticator.reason_to_refuse(method, caller)
        if reason is not None:
            await self._refuse(context, caller, reason)
        claim = claim_of(caller)
        if claim.rank in self._peers and authenticator is not self._observers:
            self.strangers.add_claim(context.peer(), claim)
        return caller

    async def _read(self, caller: Caller, context: grpc.aio.ServicerContext) -> bytes:
        """Reads the request of an admitted caller. No byte of it has been read before."""
        request: Any = None
        with contextlib.suppress(asyncio.TimeoutError):
            request = await asyncio.wait_for(self._read_all(caller, context), limits.READ_S)
        if not isinstance(request, bytes):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
        if not self._authenticator.is_signed(caller, request):
            await self._refuse(context, caller, "the request is not the one that was signed")
        return bytes(request)

    async def _read_all(self, caller: Caller, context: grpc.aio.ServicerContext) -> Any:
        async with contextlib.AsyncExitStack() as scope:
            if not self._ring.is_peer(claim_of(caller)):
                await scope.enter_async_context(self._unknown)  # few strangers at the same time
            request = await context.read()
            # The call counts as open until its end is read, and the caller may soon call again.
            return request if await context.read() is grpc.aio.EOF else None

    async def _refuse(
        self, context: grpc.aio.ServicerContext, caller: Caller, reason: str
    ) -> None:
        """Ends a call. The ring is not aborted, as the caller may be a stranger."""
        host = context.peer().rpartition(":")[0]
        if host not in self._refused_hosts and len(self._refused_hosts) < limits.SHOWN_STRANGERS:
            self._refused_hosts.add(host)
            claim = "claims to be no rank"
            if "rank" in caller:
                claim = f"claims to be rank {caller['rank'][:MAX_RANK_DIGITS]!r}"
            _log.warning(
                "rank %d has refused a call from %s, which %s: %s",
                self._peers.rank,
                context.peer(),
                claim,
                reason,
            )
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)
