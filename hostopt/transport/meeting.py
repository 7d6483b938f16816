"""How ranks meet: what they tell each other, who is missing, and who has come again.

A rank that was started again, or meets again after it has left, is another *incarnation*: it must
not take the place of its former life in a ring that knew that one.
"""

from __future__ import annotations

import json
import secrets
import zlib
from typing import Any

from hostopt.cluster import Cluster
from hostopt.errors import ConfigError
from hostopt.options import Options
from hostopt.transport.frame import WIRE_VERSION, Origin

__all__: list[str] = []


class Meeting:
    """What one rank knows of the others' presence.

    Args:
      cluster: the ring and this rank's place in it.
      options: those that must be the same on all ranks are compared.
    """

    def __init__(self, cluster: Cluster, options: Options) -> None:
        assert cluster.rank is not None
        self._cluster = cluster
        self._options = options
        self.rank = cluster.rank
        self.incarnation = secrets.token_hex(8)
        self.missing = {peer for peer in range(cluster.size) if peer != cluster.rank}
        self.incarnations: dict[int, str] = {}  # of the peers that this rank has met
        self.reasons: dict[int, str] = {}  # why a peer that answers is missing still

    def origin(self, rank: int) -> Origin:
        """What the frames of a rank say: of this one, or of a peer that it has met."""
        ring = json.dumps([str(task) for task in self._cluster.ring])
        incarnation = self.incarnation if rank == self.rank else self.incarnations[rank]
        return Origin(zlib.crc32(ring.encode()), int(incarnation, 16))

    def hello(self, to: int | None = None) -> dict[str, Any]:
        """What this rank says of itself.

        Args:
          to: rank that is answered; None where this rank calls.

        Returns:
          What JSON can hold; an answer tells which incarnation of `to` this rank has met.
        """
        options = self._options
        hello = {
            "version": WIRE_VERSION,
            "rank": self.rank,
            "incarnation": self.incarnation,
            "ring": [str(task) for task in self._cluster.ring],
            "segment_bytes": options.segment_bytes,
            "timeline": options.timeline is not None,  # the ranks compare their clocks
            "communication": options.communication,
            "compression": options.compression,
            "nonfinite": options.nonfinite,
            "desync_check_steps": options.desync_check_steps,
        }
        return hello if to is None else {**hello, "met": self.incarnations.get(to, "")}

    def check(self, peer: int, hello: dict[str, Any]) -> None:
        """Make sure that a peer knows the same ring, options and wire.

        Args:
          peer: its rank.
          hello: what it said.

        Raises:
          ConfigError: it does not.
        """
        found = {key: value for key, value in hello.items() if key not in ("incarnation", "met")}
        wanted = {**self.hello(), "rank": peer}
        del wanted["incarnation"]
        if found != wanted:
            task = self._cluster.ring[peer]
            raise ConfigError(
                f"at rank {peer} ({task}) rank {self.rank} found {json.dumps(found)}, wanted "
                f'{json.dumps(wanted)}. Give all ranks the same "cluster" in TF_CONFIG, the '
                "same options and the same version of hostopt",
                rank=peer,
                task=task.name,
                address=task.address,
            )

    def is_another_life(self, peer: int, incarnation: str) -> bool:
        """Whether a peer that this rank has met was started again since."""
        return self.incarnations.get(peer, incarnation) != incarnation

    def forget(self, peer: int) -> None:
        """Note that a peer is missing again."""
        self.incarnations.pop(peer, None)
        self.missing.add(peer)

    def missing_names(self) -> str:
        """Who is missing, and why where that is known."""
        names = []
        for peer in sorted(self.missing):
            task, reason = self._cluster.ring[peer], self.reasons.get(peer)
            names.append(f"{task.name} ({task.address})" + (f", which {reason}" if reason else ""))
        return ", ".join(names)
