"""The parts that connect one rank to its ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

from hostopt.transport.grpc.client import RpcClient
from hostopt.transport.grpc.peers import Peers
from hostopt.transport.grpc.timing import Timing
from hostopt.transport.mailbox import Mailbox
from hostopt.transport.stream import Streams


@dataclass(frozen=True)
class RingContext:
    """The ring as one rank sees it: the state of its peers, and the ways to reach them.

    Args:
      mailbox: messages that have arrived, the ring's error, and the peers that have left.
      abort: aborts the ring with an error.
    """

    peers: Peers
    client: RpcClient
    streams: Streams
    mailbox: Mailbox
    timing: Timing
    abort: Callable[[BaseException], None]
