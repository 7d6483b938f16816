"""gRPC arguments of servers and channels; docs/wire.md explains them."""

from __future__ import annotations

from hostopt.options import Options
from hostopt.process.descriptors import limit
from hostopt.transport.grpc import limits
from hostopt.transport.grpc.ring import Timing

_MAX_HTTP2_FRAME_BYTES = (1 << 24) - 1
_NEVER_MS = (1 << 31) - 1


def message_options(options: Options, timing: Timing) -> list[tuple[str, int]]:
    """Returns the arguments of servers and of channels for frames.

    They disable proxies and shared ports, and limit the size of a message. They send no pings, as
    a ping would wait behind the data of a slow link: see `control_options`.
    """
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


def server_options(options: Options, timing: Timing, size: int) -> list[tuple[str, int]]:
    """Returns `message_options` and the limits of a server's callers."""
    sent_bytes = max(limits.most_message_bytes(options), limits.most_overview_bytes(size))
    return [
        ("grpc.max_send_message_length", sent_bytes),  # gRPC uses the first of two equal options
        *message_options(options, timing),
        ("grpc.server_handshake_timeout_ms", int(1e3 * limits.HANDSHAKE_S)),
        ("grpc.max_allowed_incoming_connections", limits.most_connections(size, limit())),
        ("grpc.max_concurrent_streams", limits.CALLS_OF_A_CONNECTION),
        ("grpc.max_metadata_size", limits.HEADER_BYTES),
        ("grpc.absolute_max_metadata_size", limits.MOST_HEADER_BYTES),
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
