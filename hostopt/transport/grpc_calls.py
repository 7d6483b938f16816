"""Calls to peers and by peers, each with a proof that the token is known, where there is one.

Metadata says who calls whom: `rank`, and the incarnations `from` and `to`. With a token, `proof`
follows, and answers have theirs. A caller that does not know the incarnation that it calls is
told, and calls again: that incarnation is the challenge. What is said is read when the caller is
known: metadata has its digest.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from typing import Any, Callable

from hostopt.cluster import Cluster
from hostopt.errors import AuthError
from hostopt.options import Options
from hostopt.transport import limits
from hostopt.transport.grpc_import import grpc
from hostopt.transport.grpc_parts import control_options
from hostopt.transport.meeting import INCARNATION, Meeting
from hostopt.transport.security import Security
from hostopt.transport.strangers import Life, Strangers

__all__: list[str] = []

_log = logging.getLogger(__name__)

_CALL, _ANSWER = "call", "answer"
# How long to try to connect: a handshake takes several round trips, and computing. Of two equal
# options gRPC takes the first.
_HANDSHAKE_TIME = ("grpc.min_reconnect_backoff_ms", 3_000)
_RANK_DIGITS = 10

Metadata = tuple[tuple[str, str], ...]
Answer = Callable[[bytes, grpc.aio.ServicerContext], Awaitable[bytes]]


class Calls:
    """The calls of one rank; lives on the loop.

    Args:
      cluster: the ring and this rank's place in it.
      options: sizes.
      meeting: knows the incarnations.
      security: token and certificates.
      service: name under which the ranks call each other.
    """

    def __init__(
        self,
        cluster: Cluster,
        options: Options,
        meeting: Meeting,
        security: Security,
        service: str,
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._meeting = meeting
        self._security = security
        self._service = service
        self._warned: set[str] = set()
        self._unknown: asyncio.Semaphore | None = None
        self.strangers = Strangers(cluster.size, self._is_peer)
        self.channels: dict[int, grpc.aio.Channel] = {}

    def open(self) -> None:
        """Open a connection to every peer."""
        self._unknown = asyncio.Semaphore(limits.UNKNOWN_REQUESTS)
        for peer in self._meeting.missing:
            self.channels[peer] = self.channel(peer, control_options(self._options))

    def channel(self, peer: int, options: list[tuple[str, int]]) -> grpc.aio.Channel:
        """A new connection to a peer.

        Args:
          peer: its rank.
          options: gRPC arguments.
        """
        address, tls = self._cluster.ring[peer].address, self._security.tls
        if tls is None:
            return grpc.aio.insecure_channel(address, options)
        credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
        return grpc.aio.secure_channel(address, credentials, [_HANDSHAKE_TIME, *options])

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Let a server listen, and return its port.

        Args:
          server: the server.
          address: numeric address and port.

        Raises:
          RuntimeError: it cannot listen there; older releases of gRPC return port 0 instead.
        """
        tls = self._security.tls
        if tls is None:
            return int(server.add_insecure_port(address))
        pair = [(tls.key, tls.cert)]
        credentials = grpc.ssl_server_credentials(pair, tls.ca, require_client_auth=True)
        return int(server.add_secure_port(address, credentials))

    # -- to peers --------------------------------------------------------------------------

    async def ask(
        self,
        peer: int,
        method: str,
        request: bytes,
        timeout_s: float,
        *,
        wait_for_ready: bool = False,
    ) -> bytes:
        """Call a peer.

        Args:
          peer: its rank.
          method: name of the method.
          request: what to say.
          timeout_s: how long to wait for the answer at most.
          wait_for_ready: whether to wait for a peer that cannot be reached.

        Returns:
          Its answer.

        Raises:
          AuthError: it refuses this rank, or does not know the token.
          grpc.aio.AioRpcError: it cannot be reached, or ends the call.
        """
        kwargs = {"timeout": timeout_s, "wait_for_ready": wait_for_ready}
        life = self._meeting.incarnations.get(peer, "")
        try:
            try:
                return await self._ask(peer, life, method, request, **kwargs)
            except grpc.aio.AioRpcError as error:
                challenge = INCARNATION.fullmatch(error.details() or "")
                if error.code() is not grpc.StatusCode.UNAUTHENTICATED or not challenge:
                    raise
                life = challenge[0]
            return await self._ask(peer, life, method, request, **kwargs)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.PERMISSION_DENIED:
                raise
            reason = (error.details() or "")[: limits.SHOWN_CHARACTERS]
        raise self.refusal(peer, f"refuses this rank: {reason}")

    async def _ask(
        self, peer: int, life: str, method: str, request: bytes, **kwargs: Any
    ) -> bytes:
        stub = self.channels[peer].unary_unary(f"/{self._service}/{method}")
        call = stub(request, metadata=self.metadata(peer, life, method, request), **kwargs)
        answer: bytes = await call
        if self._security.has_token:
            found = _texts(await call.trailing_metadata()).get("proof", "")
            facts = (_ANSWER, method, str(peer), str(self._meeting.rank))
            lives = (life, self._meeting.incarnation)
            if not self._security.is_proof(found, *facts, *lives, body=answer):
                raise self.refusal(peer, "answers without knowing the token of this rank")
        return answer

    def stream(self, peer: int, channel: grpc.aio.Channel) -> Any:
        """Begin to send frames to a peer that has been met; returns the call.

        Args:
          peer: its rank.
          channel: a connection to it.
        """
        life = self._meeting.incarnations.get(peer, "")
        metadata = self.metadata(peer, life, "Stream", b"")
        return channel.stream_unary(f"/{self._service}/Stream")(metadata=metadata)

    def metadata(self, peer: int, life: str, method: str, request: bytes) -> Metadata:
        """Who calls, and the proof of it and of what is said.

        Args:
          peer: who is called.
          life: its incarnation.
          method: name of the method.
          request: what is said.
        """
        rank, own = str(self._meeting.rank), self._meeting.incarnation
        metadata = (("rank", rank), ("from", own), ("to", life))
        if not self._security.has_token:
            return metadata
        facts, digest = (_CALL, method, rank, str(peer), own, life), _digest(request)
        proof = self._security.proof(*facts, body=digest.encode())
        return (*metadata, ("digest", digest), ("proof", proof))

    def refusal(self, peer: int, found: str) -> AuthError:
        """The error of a ring that one peer cannot be part of.

        Args:
          peer: its rank.
          found: what is wrong with it.
        """
        task = self._cluster.ring[peer]
        return AuthError(
            f"rank {peer} ({task}) {found}. Found by rank {self._meeting.rank} "
            f"({self._cluster.task}). Give all ranks the same token, in token_file or "
            "HOSTOPT_TOKEN, and each a tls_dir with a valid certificate of the same CA, or none "
            "of them any",
            rank=peer,
            task=task.name,
            address=task.address,
            root_cause=f"rank {peer} ({task}) {found}",
        )

    # -- by peers --------------------------------------------------------------------------

    def handlers(self, stream: Any, **methods: Answer) -> grpc.GenericRpcHandler:
        """What the server of this rank answers.

        Args:
          stream: takes a stream of frames; it calls `admit_stream` first.
          methods: answers by name; called for those that may call this rank.
        """
        handlers = {name: self._handler(name, answer) for name, answer in methods.items()}
        handlers["Stream"] = grpc.stream_unary_rpc_method_handler(stream)
        return grpc.method_handlers_generic_handler(self._service, handlers)

    def _handler(self, method: str, answer: Answer) -> grpc.RpcMethodHandler:
        async def handle(_: Any, context: grpc.aio.ServicerContext) -> bytes:
            caller = await self._admit(method, context)
            request = await self._read(caller, context)
            found = await answer(request, context)
            if self._security.has_token:
                facts = (_ANSWER, method, str(self._meeting.rank), caller.get("rank", ""))
                lives = (self._meeting.incarnation, caller.get("from", ""))
                proof = self._security.proof(*facts, *lives, body=found)
                context.set_trailing_metadata((("proof", proof),))
            return found

        return grpc.stream_unary_rpc_method_handler(handle)  # which reads by itself

    async def admit_stream(self, context: grpc.aio.ServicerContext) -> int:
        """The peer whose stream begins; a stranger's call ends here, and disturbs nobody.

        Args:
          context: of the call.
        """
        caller, code = await self._admit("Stream", context), grpc.StatusCode
        peer = _rank(caller)
        if peer not in self.channels:
            await context.abort(code.INVALID_ARGUMENT, "this is no rank of this ring")
        met = self._meeting.incarnations.get(peer)
        if caller.get("to") != self._meeting.incarnation or caller.get("from") != met:
            await context.abort(code.NOT_FOUND, "this rank is of another ring")
        return peer

    async def _admit(self, method: str, context: grpc.aio.ServicerContext) -> dict[str, str]:
        """Let a caller in that knows the token, or knows of none where this rank has none."""
        caller = _texts(context.invocation_metadata())
        proof, own = caller.get("proof"), self._meeting.incarnation
        if (proof is None) == self._security.has_token:
            has = (
                "no token, and this rank has one"
                if proof is None
                else ("a token, and this rank has none")
            )
            await self._refuse(context, caller, f"the caller has {has}")
        if proof is not None:
            if caller.get("to") != own:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, own)
            facts = (_CALL, method, caller.get("rank", ""), str(self._meeting.rank))
            lives, digest = (caller.get("from", ""), own), caller.get("digest", "")
            if not self._security.is_proof(proof, *facts, *lives, body=digest.encode()):
                await self._refuse(context, caller, "the caller has another token")
        if _rank(caller) in self.channels:
            self.strangers.claim(context.peer(), _life(caller))
        return caller

    def _is_peer(self, life: Life) -> bool:
        """Whether whoever makes such a claim is a peer: with a token it has proven that."""
        met = self._meeting.incarnations.get(life.rank)
        return self._security.has_token or life.incarnation == met

    async def _read(self, caller: dict[str, str], context: grpc.aio.ServicerContext) -> bytes:
        """What an admitted caller says; not its first byte is read before."""
        request: Any = None
        with contextlib.suppress(asyncio.TimeoutError):
            request = await asyncio.wait_for(self._take(caller, context), limits.READ_S)
        if not isinstance(request, bytes):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call says nothing")
        if self._security.has_token and _digest(request) != caller.get("digest"):
            await self._refuse(context, caller, "what the caller says is not what it has proven")
        return bytes(request)

    async def _take(self, caller: dict[str, str], context: grpc.aio.ServicerContext) -> Any:
        async with self._turn(caller):
            request = await context.read()
            # the stream counts until its end is read, and the caller may soon call again
            return request if await context.read() is grpc.aio.EOF else None

    def _turn(self, caller: dict[str, str]) -> AbstractAsyncContextManager[Any]:
        """Scope of a read: few of callers that may be anybody may hold what they say in memory."""
        if self._is_peer(_life(caller)) or self._unknown is None:
            return contextlib.AsyncExitStack()
        return self._unknown

    async def _refuse(
        self, context: grpc.aio.ServicerContext, caller: dict[str, str], why: str
    ) -> None:
        """End a call. It ends no ring: whoever claims to be a rank may be a stranger."""
        host = context.peer().rpartition(":")[0]
        if host not in self._warned and len(self._warned) < limits.SHOWN_STRANGERS:
            self._warned.add(host)
            claim = caller.get("rank", "")[:_RANK_DIGITS]
            _log.warning(
                "rank %d has refused a call from %s, which claims to be rank %r: %s",
                self._meeting.rank,
                context.peer(),
                claim,
                why,
            )
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)


def _rank(caller: dict[str, str]) -> int:
    """The rank that a caller claims to be; -1 where it is none."""
    claim = caller.get("rank", "")
    is_number = claim.isascii() and claim.isdigit() and len(claim) < _RANK_DIGITS
    return int(claim) if is_number else -1


def _life(caller: dict[str, str]) -> Life:
    return Life(_rank(caller), caller.get("from", ""))


def _digest(request: bytes) -> str:
    return hashlib.sha256(request).hexdigest()


def _texts(metadata: Any) -> dict[str, str]:
    """Metadata by key; what some releases of gRPC return has keys, and is no dict."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}
