"""Collectives over byte strings, whose lengths may differ between ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from hostopt.cluster.cluster import Cluster
from hostopt.collectives.call import Channel
from hostopt.collectives.host_memory import HostMemory
from hostopt.collectives.messages import CallMessages
from hostopt.collectives.network import Network
from hostopt.collectives.ring import RingGroup
from hostopt.errors import CollectiveMismatchError
from hostopt.transport import event_loop

_SHOWN_NAMES = 20  # maximum number of names in an error


def all_gather_bytes(
    channel: Channel, memory: HostMemory | None, network: Network, data: Any, name: str
) -> Any:
    """Gathers byte strings on every rank; see `Communicator.all_gather_bytes`."""
    view = memoryview(data)
    view = view.cast("B").toreadonly() if view.nbytes else memoryview(b"")
    call = channel.begin_call("all_gather_bytes", name)
    shared_memory = None
    if memory is not None:
        # All ranks must choose the same block size, so it must not depend on the length of the
        # data, which may differ between ranks. The smallest blocks stay in cache.
        shared_memory = memory.channel_of_all(0, call.signature.text)
    if shared_memory is not None:
        gathered = shared_memory.all_gather_bytes(view, call)
    else:
        gathered = network.group(call).all_gather_bytes(call, view)
    if isinstance(data, bytes):
        gathered = [bytes(each) for each in gathered]
        gathered[channel.rank] = data
    return gathered


def gather_bytes(channel: Channel, data: bytes, name: str) -> list[bytes]:
    """Gathers the bytes of every rank on rank 0; see `Communicator.gather_bytes`."""
    call = channel.begin_call("gather_bytes", name)
    lengths = RingGroup(channel.transport).all_gather(call, np.array(len(data), np.int64))
    messages = CallMessages(channel.transport, channel.signed_call("gather_bytes", name))
    if channel.rank != 0:
        event_loop.run(messages.send_segments(0, np.frombuffer(data, np.uint8)))
        return []
    gathered = [data]
    for peer in range(1, channel.size):
        flat = np.empty(int(lengths[peer]), np.uint8)
        event_loop.run(messages.receive_segments(peer, flat))
        gathered.append(flat.tobytes())
    return gathered


def scatter_bytes(channel: Channel, data: Sequence[bytes], name: str) -> bytes:
    """Sends a byte string from rank 0 to each rank; see `Communicator.scatter_bytes`."""
    is_root = channel.rank == 0
    lengths = np.array([len(each) for each in data] if is_root else [0] * channel.size, np.int64)
    RingGroup(channel.transport).broadcast(channel.begin_call("scatter_bytes", name), lengths, 0)
    messages = CallMessages(channel.transport, channel.signed_call("scatter_bytes", name))
    if not is_root:
        flat = np.empty(int(lengths[channel.rank]), np.uint8)
        event_loop.run(messages.receive_segments(0, flat))
        return flat.tobytes()
    for peer in range(1, channel.size):
        event_loop.run(messages.send_segments(peer, np.frombuffer(data[peer], np.uint8)))
    return data[0]


def check_same(
    channel: Channel,
    memory: HostMemory | None,
    network: Network,
    table: dict[str, str],
    name: str,
) -> list[str]:
    """Checks that all ranks have the same entries; see `Communicator.check_same`."""
    texts = all_gather_bytes(channel, memory, network, json.dumps(table).encode(), name)
    tables = [json.loads(text) for text in texts]
    if any(other != tables[0] for other in tables):
        raise _mismatch(tables, channel.transport.cluster, name)
    return list(tables[0])


def _mismatch(
    tables: Sequence[dict[str, str]], cluster: Cluster, description: str
) -> CollectiveMismatchError:
    differing = [rank for rank, table in enumerate(tables) if table != tables[0]]
    names = sorted(
        name
        for name in set().union(*tables)
        if any(table.get(name) != tables[0].get(name) for table in tables)
    )
    shown = [f"{name!r}: {_values(tables, name)}" for name in names[:_SHOWN_NAMES]]
    if len(names) > _SHOWN_NAMES:
        shown.append(f"and {len(names) - _SHOWN_NAMES} more")
    return CollectiveMismatchError(
        f"{description} differ between {cluster.describe(0)} and "
        f"{', '.join(map(cluster.describe, differing))}: {'; '.join(shown)}. "
        "Start all ranks with the same program and options",
        **cluster.attributes(differing[0]),
    )


def _values(tables: Sequence[dict[str, str]], name: str) -> str:
    """Lists a name's values with their ranks; rank 0 alone stands for those that agree with it."""
    ranks: dict[str, list[int]] = {}
    for rank, table in enumerate(tables):
        ranks.setdefault(table.get(name, "none"), []).append(rank)
    ranks[tables[0].get(name, "none")] = [0]
    return ", ".join(
        f"rank {holders[0]} has {value}"
        if len(holders) == 1
        else f"ranks {', '.join(map(str, holders))} have {value}"
        for value, holders in ranks.items()
    )
