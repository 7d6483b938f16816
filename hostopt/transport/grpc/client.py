"""Calls to the peers of one rank."""

from __future__ import annotations

from typing import Any

from hostopt.errors import AuthError
from hostopt.options import Options
from hostopt.transport.grpc import limits
from hostopt.transport.grpc.authentication import Authenticator
from hostopt.transport.grpc.channel_options import control_options, message_options
from hostopt.transport.grpc.peers import INCARNATION, Peers
from hostopt.transport.grpc.runtime import grpc
from hostopt.transport.grpc.timing import Timing
from hostopt.transport.security import Tls

# Minimum time for an attempt to connect with TLS, whose handshake takes several round trips. gRPC
# uses the first of two equal options.
HANDSHAKE_TIME = ("grpc.min_reconnect_backoff_ms", 3_000)


def open_channel(
    address: str, options: list[tuple[str, int]], tls: Tls | None
) -> grpc.aio.Channel:
    """Opens a connection."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options)
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
    return grpc.aio.secure_channel(address, credentials, [HANDSHAKE_TIME, *options])


class RpcClient:
    """The connections of one rank to its peers; used on the event loop.

    Attributes:
      channels: the connection for calls to each peer, by rank.
    """

    def __init__(
        self,
        peers: Peers,
        options: Options,
        authenticator: Authenticator,
        tls: Tls | None,
        service: str,
        timing: Timing,
    ) -> None:
        self._peers = peers
        self._options = options
        self._authenticator = authenticator
        self._tls = tls
        self._service = service
        self._timing = timing
        self.channels: dict[int, grpc.aio.Channel] = {}

    def open(self) -> None:
        """Opens a connection to every peer."""
        for peer in self._peers.missing:
            self.channels[peer] = self._open_channel(
                peer, control_options(self._options, self._timing)
            )

    def _open_channel(self, peer: int, options: list[tuple[str, int]]) -> grpc.aio.Channel:
        return open_channel(self._peers.cluster.ring[peer].address, options, self._tls)

    async def call(
        self,
        peer: int,
        method: str,
        request: bytes,
        timeout_s: float,
        *,
        wait_for_ready: bool = False,
    ) -> bytes:
        """Calls a peer.

        Args:
          wait_for_ready: waits for a peer that cannot be reached, instead of raising.

        Raises:
          AuthError: it refuses this rank, or does not know the token.
          grpc.aio.AioRpcError: it cannot be reached, or ends the call.
        """
        kwargs = {"timeout": timeout_s, "wait_for_ready": wait_for_ready}
        incarnation = self._peers.incarnations.get(peer, "")
        try:
            try:
                return await self._call(peer, incarnation, method, request, **kwargs)
            except grpc.aio.AioRpcError as error:
                challenge = INCARNATION.fullmatch(error.details() or "")
                if error.code() is not grpc.StatusCode.UNAUTHENTICATED or not challenge:
                    raise
                incarnation = challenge[0]
            return await self._call(peer, incarnation, method, request, **kwargs)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.PERMISSION_DENIED:
                raise
            reason = (error.details() or "")[: limits.SHOWN_CHARACTERS]
        raise self.auth_error(peer, f"refuses this rank: {reason}")

    async def _call(
        self, peer: int, incarnation: str, method: str, request: bytes, **kwargs: Any
    ) -> bytes:
        stub = self.channels[peer].unary_unary(f"/{self._service}/{method}")
        metadata = self._authenticator.call_metadata(peer, incarnation, method, request)
        call = stub(request, metadata=metadata, **kwargs)
        answer: bytes = await call
        trailing = await call.trailing_metadata()
        self._authenticator.check_answer(peer, incarnation, method, answer, trailing)
        return answer

    def open_stream(self, peer: int) -> tuple[grpc.aio.Channel, Any]:
        """Starts a stream of frames to a peer; returns its own connection, and the call."""
        channel = self._open_channel(peer, message_options(self._options, self._timing))
        incarnation = self._peers.incarnations.get(peer, "")
        metadata = self._authenticator.call_metadata(peer, incarnation, "Stream")
        stub = channel.stream_unary(f"/{self._service}/Stream")
        # a first attempt to connect may fail on a busy machine
        return channel, stub(metadata=metadata, wait_for_ready=True)

    def auth_error(self, rank: int, fault: str) -> AuthError:
        """See `Authenticator.auth_error`."""
        return self._authenticator.auth_error(rank, fault)
