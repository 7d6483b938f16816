"""The state of the other ranks, as one rank knows it.

Each start of a rank is another *incarnation*, a random number. A rank that has been started again
must not take the place of its earlier incarnation in a ring.
"""

from __future__ import annotations

import json
import re
import secrets
import zlib
from typing import Any

from hostopt.cluster.cluster import Cluster
from hostopt.transport.frame import Origin
from hostopt.transport.grpc.limits import most_note_bytes

INCARNATION = re.compile("[0-9a-f]{1,16}")


class Peers:
    """The peers of one rank; used on the event loop.

    Attributes:
      incarnation: incarnation of this rank.
      incarnations: incarnation of each connected peer, by rank.
      data_port: port of this rank's data server; 0 if there is none.
      data_ports: the same of each connected peer, by rank.
      missing: peers that the rendezvous waits for.
      reasons: the reason why a peer that answers is still missing, by rank.
      gone: peers that have left or whose process is gone.
      connected: True once the rendezvous is complete.
      most_note_bytes: size limit of a JSON message.
    """

    def __init__(self, cluster: Cluster) -> None:
        assert cluster.rank is not None
        self.cluster = cluster
        self.rank = cluster.rank
        self.successor = (cluster.rank + 1) % cluster.size
        self.incarnation = secrets.token_hex(8)
        self.incarnations: dict[int, str] = {}
        self.data_port = 0
        self.data_ports: dict[int, int] = {}
        self.missing = set(range(cluster.size)) - {cluster.rank}
        self.reasons: dict[int, str] = {}
        self.gone: set[int] = set()
        self.connected = False
        self.most_note_bytes = most_note_bytes(cluster.size)

    def __contains__(self, rank: int) -> bool:
        return 0 <= rank < self.cluster.size and rank != self.rank

    def origin(self, rank: int) -> Origin:
        """Returns the origin that the frames of this rank or of a connected peer carry."""
        ring = json.dumps([str(task) for task in self.cluster.ring])
        incarnation = self.incarnation if rank == self.rank else self.incarnations[rank]
        return Origin(zlib.crc32(ring.encode()), int(incarnation, 16))

    def add(self, peer: int, hello: dict[str, Any]) -> None:
        """Notes the incarnation and the data port of a peer."""
        self.incarnations[peer] = hello["incarnation"]
        self.data_ports[peer] = hello["data_port"]

    def is_restarted(self, peer: int, incarnation: str) -> bool:
        """Returns True if a connected peer had another incarnation than this one."""
        return self.incarnations.get(peer, incarnation) != incarnation

    def forget(self, peer: int) -> None:
        """Marks a peer as missing again."""
        self.incarnations.pop(peer, None)
        self.missing.add(peer)
        self.gone.discard(peer)

    def missing_names(self) -> str:
        """Returns the missing peers as text, with the reasons that are known."""
        names = []
        for peer in sorted(self.missing):
            task, reason = self.cluster.ring[peer], self.reasons.get(peer)
            names.append(f"{task.name} ({task.address})" + (f", which {reason}" if reason else ""))
        return ", ".join(names)
