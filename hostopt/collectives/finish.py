"""Barrier at the end of training, which detects ranks that have more calls to make."""

from __future__ import annotations

import numpy as np

from hostopt.collectives.channel import Channel
from hostopt.collectives.hosts import Hosts
from hostopt.collectives.ring import RingGroup
from hostopt.transport import event_loop
from hostopt.transport.message import FINISH_CHANNEL, Tag

__all__: list[str] = []


def finish(channel: Channel, hosts: Hosts | None, name: str) -> None:
    """Waits for all ranks; see `Communicator.finish`."""
    if channel.size == 1:
        return
    call = channel.signed_call("finish", name)._replace(channel=FINISH_CHANNEL)
    channel.begin(call)
    # A rank that receives this marker while it waits for data of this rank fails immediately.
    marker = Tag(FINISH_CHANNEL, call.step, bucket=1)
    for peer in _receivers(channel.rank, channel.size, hosts):
        event_loop.run(channel.transport.send(peer, marker, b"", name))
    RingGroup(channel.transport).all_reduce(call, np.zeros(1, np.int32))
    channel.transport.mailbox.resume(call.step)


def _receivers(rank: int, size: int, hosts: Hosts | None) -> set[int]:
    """Returns the ranks that may wait for data of a rank: the next one, and those on its host."""
    peers = {(rank + 1) % size}
    if hosts is not None:
        leaders = hosts.leaders
        peers.update(hosts.members(rank))
        if rank in leaders:
            peers.add(leaders[(leaders.index(rank) + 1) % len(leaders)])
    return peers - {rank}
