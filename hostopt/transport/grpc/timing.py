"""Times of the gRPC transport that are not options; docs/wire.md lists them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Deadlines and intervals, in seconds.

    Args:
      keepalive_s: silence of a peer after which gRPC pings it.
      retry_after_s: pause before a peer that is not ready is called again.
      progress_every_s: interval of warnings that name the missing ranks.
      last_message_s: time to wait for a peer's Leave message before declaring the peer lost.
      auth_linger_s: time that a rank keeps serving after an `AuthError` in the rendezvous, so
        that its peers detect the same error.
      drop_after_s: time between an abort and the cancellation of streams.
      leave_timeout_s: time to wait for peers to take the last frames and Leave messages.
    """

    keepalive_s: float = 10.0
    ping_timeout_s: float = 15.0
    hello_timeout_s: float = 1.0
    retry_after_s: float = 0.05
    progress_every_s: float = 10.0
    status_timeout_s: float = 1.0
    details_timeout_s: float = 2.0
    last_message_s: float = 0.5
    auth_linger_s: float = 2.5
    drop_after_s: float = 0.1
    leave_timeout_s: float = 2.0


DEFAULT = Timing()
