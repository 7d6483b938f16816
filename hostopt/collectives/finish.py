"""Barrier at the end of training, which detects ranks that have more calls to make."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hostopt.collectives import recursive_doubling
from hostopt.collectives.channel import Channel
from hostopt.collectives.hosts import Hosts
from hostopt.collectives.ring import RingGroup
from hostopt.transport import event_loop
from hostopt.transport.message import FINISH_CHANNEL, Tag


def finish(channel: Channel, hosts: Hosts | None, name: str) -> None:
    """Waits for all ranks; see `Communicator.finish`."""
    if channel.size == 1:
        return
    # all communicators of a ring share the channel, so their calls are numbered together
    number = next(channel.transport.finishes)
    call = channel.signed_call("finish", name)._replace(channel=FINISH_CHANNEL, step=number)
    channel.begin(call)
    # A rank that receives this marker while it waits for data of this rank fails immediately.
    marker = Tag(FINISH_CHANNEL, call.step, bucket=1)
    for peer in _receivers(channel.rank, channel.size, hosts):
        event_loop.run(channel.transport.send(peer, marker, b"", name))
    RingGroup(channel.transport).all_reduce(call, np.zeros(1, np.int32))
    channel.transport.mailbox.resume(call.step)


def _receivers(rank: int, size: int, hosts: Hosts | None) -> set[int]:
    """Returns the ranks that may wait for data of a rank, in any all-reduce."""
    peers = _receivers_in(range(size), rank)
    if hosts is not None:
        peers.update(hosts.members(rank))
        if rank in hosts.leaders:
            peers |= _receivers_in(hosts.leaders, rank)
    return peers - {rank}


def _receivers_in(members: Sequence[int], rank: int) -> set[int]:
    """Returns the next rank on the ring, and the partners of recursive doubling."""
    index, size = members.index(rank), len(members)
    positions = [(index + 1) % size, *recursive_doubling.partners(index, size)]
    return {members[position] for position in positions}
