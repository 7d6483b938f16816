"""Calls to the peers of one rank, and the gRPC arguments of channels: see docs/wire.md."""

from __future__ import annotations

from typing import Any

from hostopt.options import Options
from hostopt.transport.grpc import limits
from hostopt.transport.grpc.ring import INCARNATION, Ring, Timing
from hostopt.transport.grpc.runtime import grpc
from hostopt.transport.security import Authenticator, Identity, Tls, claim_of, read_metadata

# Minimum time for an attempt to connect with TLS, whose handshake takes several round trips. gRPC
# uses the first of two equal options.
HANDSHAKE_TIME = ("grpc.min_reconnect_backoff_ms", 3_000)
_MAX_HTTP2_FRAME_BYTES = (1 << 24) - 1
_NEVER_MS = (1 << 31) - 1


def message_options(options: Options, timing: Timing) -> list[tuple[str, int]]:
    """Returns the arguments of servers and of channels for frames; docs/wire.md says why."""
    message_bytes = limits.most_message_bytes(options)
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", int(1e3 * timing.keepalive_s) // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.http2.max_frame_size", min(message_bytes, _MAX_HTTP2_FRAME_BYTES)),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", message_bytes),
    ]


def control_options(options: Options, timing: Timing) -> list[tuple[str, int]]:
    """Returns `message_options` and pings, which detect a peer that is frozen or unreachable."""
    ping_timeout_ms = int(1e3 * timing.ping_timeout_s)
    return [
        *message_options(options, timing),
        ("grpc.keepalive_time_ms", int(1e3 * timing.keepalive_s)),
        ("grpc.keepalive_timeout_ms", ping_timeout_ms),
        ("grpc.http2.ping_timeout_ms", ping_timeout_ms),
        ("grpc.client_idle_timeout_ms", _NEVER_MS),  # pings do not count as calls
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def open_channel(
    address: str, options: list[tuple[str, int]], tls: Tls | None
) -> grpc.aio.Channel:
    """Opens a connection."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options)
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
    return grpc.aio.secure_channel(address, credentials, [HANDSHAKE_TIME, *options])


def challenger(error: grpc.aio.AioRpcError) -> int:
    """Returns the rank that asks a caller for a proof; -1 if it names none."""
    return claim_of(read_metadata(error.trailing_metadata())).rank


async def call_signed(
    stub: Any, signer: Authenticator, called: Identity, method: str, request: bytes, **times: float
) -> bytes | None:
    """Calls a rank, again if it asks for a proof that is made for its incarnation.

    Returns None if the answer does not prove that the rank knows the token. The error of another
    rank, which has been called by mistake, has the code UNAUTHENTICATED.
    """
    is_challenged = False
    while True:
        metadata = signer.call_metadata(called, method, request)
        answering = stub(request, metadata=metadata, **times)
        try:
            answer: bytes = await answering
        except grpc.aio.AioRpcError as error:
            code, challenge = error.code(), INCARNATION.fullmatch(error.details() or "")
            is_meant = called.rank == -1 or challenger(error) in (-1, called.rank)
            is_asked = code is grpc.StatusCode.UNAUTHENTICATED and is_meant
            if is_challenged or not is_asked or not challenge:
                raise
            is_challenged, called = True, called._replace(incarnation=challenge[0])
            continue
        trailing = await answering.trailing_metadata()
        return answer if signer.is_answer(called, method, answer, trailing) else None


class RpcClient:
    """The connections of one rank to its peers; used on the event loop."""

    def __init__(self, ring: Ring, service: str) -> None:
        self._ring = ring
        self._peers = ring.peers
        self._service = service
        self.authenticator = Authenticator(ring.peers.local, ring.security)
        self._control = control_options(ring.options, ring.timing)
        self.channels: dict[int, grpc.aio.Channel] = {}  # for calls to each peer

    def open(self) -> None:
        """Opens a connection to every peer."""
        for peer in self._peers.missing:
            self.channels[peer] = self._open_channel(peer, self._control)

    async def reopen(self, peer: int) -> None:
        """Connects to a peer where its name leads to now."""
        earlier, self.channels[peer] = self.channels[peer], self._open_channel(peer, self._control)
        await earlier.close(self._ring.timing.hello_timeout_s)  # other calls may end

    def _open_channel(self, peer: int, options: list[tuple[str, int]]) -> grpc.aio.Channel:
        address = self._peers.cluster.ring[peer].address
        return open_channel(address, options, self._ring.security.tls)

    async def call(
        self,
        peer: int,
        method: str,
        request: bytes,
        timeout_s: float,
        wait_for_ready: bool = False,
    ) -> bytes:
        """Calls a peer, and waits for one that cannot be reached if `wait_for_ready`.

        Raises:
          AuthError: it refuses this rank, or does not know the token.
          grpc.aio.AioRpcError: it cannot be reached, or ends the call.
        """
        stub = self.channels[peer].unary_unary(f"/{self._service}/{method}")
        times = {"timeout": timeout_s, "wait_for_ready": wait_for_ready}
        called = self._peers.identity(peer)
        fault = "answers without knowing the token of this rank"
        try:
            answer = await call_signed(stub, self.authenticator, called, method, request, **times)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.PERMISSION_DENIED:
                raise
            answer = None
            fault = f"refuses this rank: {(error.details() or '')[: limits.SHOWN_CHARACTERS]}"
        if answer is None:
            raise self._ring.auth_error(peer, fault)
        return answer

    def open_stream(self, peer: int) -> tuple[grpc.aio.Channel, Any]:
        """Starts a stream of frames to a peer; returns its own connection, and the call."""
        options = message_options(self._ring.options, self._ring.timing)
        channel = self._open_channel(peer, options)
        metadata = self.authenticator.call_metadata(self._peers.identity(peer), "Stream")
        stub = channel.stream_unary(f"/{self._service}/Stream")
        # a first attempt to connect may fail on a busy machine
        return channel, stub(metadata=metadata, wait_for_ready=True)
