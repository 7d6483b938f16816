"""How ranks meet: what they tell each other, who is missing, and who has come again.

A rank that was started again, or meets again after it has left, is another *incarnation*: it must
not take the place of its former life in a ring that knew that one.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import zlib
from collections.abc import Sequence
from typing import Any

from hostopt.cluster import Cluster
from hostopt.errors import ConfigError
from hostopt.options import Options
from hostopt.shapes import has_shape
from hostopt.transport.frame import WIRE_VERSION, Origin
from hostopt.transport.limits import SHOWN_CHARACTERS, SHOWN_DIFFERENCES, most_note_bytes
from hostopt.transport.notes import read_note
from hostopt.versions import MAY_DIFFER, MUST_BE_SAME, own_versions

__all__: list[str] = []

_log = logging.getLogger(__name__)

INCARNATION = re.compile("[0-9a-f]{1,16}")
_OF_ONE_RANK = ("incarnation", "met", *MAY_DIFFER)
_WORDS = {"version": "wire version", "python": "Python", "tensorflow": "TensorFlow"}
_NONE = object()  # of a rank that does not say


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
        self._compared: set[int] = set()  # peers whose versions are known
        self.most_note_bytes = most_note_bytes(cluster.size)

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
            **own_versions(),
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

    def read_hello(self, data: bytes) -> dict[str, Any]:
        """Read what a caller, or one who was called, says of itself.

        Args:
          data: what has been sent.

        Returns:
          The note. "rank" is a peer, "incarnation" can be one; the rest is for `check`.

        Raises:
          ValueError: it says not who it is.
        """
        hello = read_note(data, self.most_note_bytes)
        if not has_shape(hello, {"rank": int, "incarnation": str}):
            raise ValueError("a hello without a rank and an incarnation")
        is_peer = 0 <= hello["rank"] < self._cluster.size and hello["rank"] != self.rank
        if not is_peer or not INCARNATION.fullmatch(hello["incarnation"]):
            raise ValueError("a hello of no peer")
        return hello

    def check(self, peer: int, hello: dict[str, Any]) -> None:
        """Make sure that a peer knows the same ring, options and wire.

        Args:
          peer: its rank.
          hello: what it said, as `read_hello` returns it.

        Raises:
          ConfigError: it does not; names what differs, and nothing else.
        """
        own = {**self.hello(), "rank": peer}
        keys = [key for key in {**own, **hello} if key not in _OF_ONE_RANK]
        different = [key for key in keys if hello.get(key, _NONE) != own.get(key, _NONE)]
        different = [key for key in different if key in MUST_BE_SAME] or different
        if different:
            task = self._cluster.ring[peer]
            found = "; ".join(
                self._difference(peer, key, hello.get(key, _NONE), own.get(key, _NONE))
                for key in different[:SHOWN_DIFFERENCES]
            )
            if len(different) > SHOWN_DIFFERENCES:
                found += f"; and {len(different) - SHOWN_DIFFERENCES} more"
            raise ConfigError(
                f"{found}. {_advice(different)}",
                rank=peer,
                task=task.name,
                address=task.address,
            )
        self._compare_versions(peer, hello)

    def _compare_versions(self, peer: int, hello: dict[str, Any]) -> None:
        """Warn of those that may differ, once of each peer."""
        if peer in self._compared:
            return
        self._compared.add(peer)
        own = own_versions()
        for name in MAY_DIFFER:
            if own[name] is not None and hello.get(name) not in (own[name], None):
                _log.warning(
                    "%s. Sums stay exact, but what ranks compute by themselves may differ: "
                    "install the same on all ranks",
                    self._difference(peer, name, hello[name], own[name]),
                )

    def _difference(self, peer: int, key: str, theirs: Any, own: Any) -> str:
        """What two ranks say, in the order of their ranks, so that both of them say the same."""
        if key == "rank":
            task = self._cluster.ring[peer]
            return f"at the address of rank {peer} ({task}) rank {_shown(theirs)} answers"
        said = dict(sorted({peer: theirs, self.rank: own}.items()))
        what = _WORDS.get(key, key if key in self.hello() else _shown(key))
        if key == "ring" and isinstance(theirs, list):
            what, said = _first_difference(said)
        quotes = "'" if key in own_versions() else ""
        return ", ".join(
            f"rank {rank} ({self._cluster.ring[rank]}) has {what} {_shown(value).strip(quotes)}"
            for rank, value in said.items()
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


def _first_difference(rings: dict[int, list[Any]]) -> tuple[str, dict[int, Any]]:
    """Where the rings of two ranks differ first; one may be longer."""
    first, second = rings.values()
    index = 0
    while [first[index : index + 1]] == [second[index : index + 1]]:
        index += 1
    found = {rank: (ring[index : index + 1] or [_NONE])[0] for rank, ring in rings.items()}
    return f"as task {index} of its ring", found


def _shown(value: Any) -> str:
    return "nothing" if value is _NONE else repr(value)[:SHOWN_CHARACTERS]


def _advice(different: Sequence[str]) -> str:
    if any(key in MUST_BE_SAME or key == "version" for key in different):
        return "Install the same version of hostopt on all ranks"
    if "ring" in different or "rank" in different:
        return 'Give all ranks the same "cluster" in TF_CONFIG'
    return "Give all ranks the same options"
