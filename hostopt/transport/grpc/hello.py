"""Hello messages: each rank describes itself, and compares its description with its peers'."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from hostopt.errors import ConfigError
from hostopt.options import Options
from hostopt.shapes import has_shape
from hostopt.transport.frame import WIRE_VERSION
from hostopt.transport.grpc.limits import SHOWN_CHARACTERS, SHOWN_DIFFERENCES
from hostopt.transport.grpc.notes import read_note
from hostopt.transport.grpc.peers import INCARNATION, Peers
from hostopt.versions import MAY_DIFFER, MUST_BE_SAME, local_versions

_log = logging.getLogger(__name__)

_DIFFERS_BY_RANK = ("incarnation", "met", "data_port", *MAY_DIFFER)
_MAX_PORT = (1 << 16) - 1
_NAMES = {"version": "wire version", "python": "Python", "tensorflow": "TensorFlow"}
_ABSENT = object()


class HelloMessages:
    """Builds, reads and compares the Hello messages of one rank."""

    def __init__(self, peers: Peers, options: Options) -> None:
        self._peers = peers
        self._cluster = peers.cluster
        self._options = options
        self._compared: set[int] = set()  # peers whose versions have been compared

    def build(self, to: int | None = None) -> dict[str, Any]:
        """Describes this rank.

        Args:
          to: rank that is answered; None in a request.

        Returns:
          The message, in types that JSON supports. In an answer, "met" is the incarnation of `to`
          that this rank is connected to.
        """
        options = self._options
        hello = {
            **local_versions(),
            "version": WIRE_VERSION,
            "rank": self._peers.rank,
            "incarnation": self._peers.incarnation,
            "data_port": self._peers.data_port,
            "ring": [str(task) for task in self._cluster.ring],
            "segment_bytes": options.segment_bytes,
            "timeline": options.timeline is not None,  # all ranks must compare their clocks
            "communication": options.communication,
            "compression": options.compression,
            "nonfinite": options.nonfinite,
            "desync_check_steps": options.desync_check_steps,
            "autotune": options.autotune,  # all ranks must try the same options
        }
        return hello if to is None else {**hello, "met": self._peers.incarnations.get(to, "")}

    def read(self, data: bytes) -> dict[str, Any]:
        """Reads the Hello message of a peer.

        Returns:
          The message, whose "rank" is that of a peer, and whose "incarnation" and "data_port" are
          well formed.
          `check` compares the other fields.
        """
        hello = read_note(data, self._peers.most_note_bytes)
        if not has_shape(hello, {"rank": int, "incarnation": str}):
            raise ValueError("a Hello message without rank and incarnation")
        port = hello.setdefault("data_port", 0)  # `check` names an older version of hostopt
        if not has_shape(hello, {"data_port": int}) or not 0 <= port <= _MAX_PORT:
            raise ValueError("a Hello message with a data port that does not exist")
        if hello["rank"] not in self._peers or not INCARNATION.fullmatch(hello["incarnation"]):
            raise ValueError("a Hello message that does not identify a peer")
        return hello

    def check(self, peer: int, hello: dict[str, Any]) -> None:
        """Raises an error unless a peer has the same ring, options and wire format."""
        local = {**self.build(), "rank": peer}
        keys = [key for key in {**local, **hello} if key not in _DIFFERS_BY_RANK]
        different = [key for key in keys if hello.get(key, _ABSENT) != local.get(key, _ABSENT)]
        different = [key for key in different if key in MUST_BE_SAME] or different
        if different:
            text = "; ".join(
                self._difference(peer, key, hello.get(key, _ABSENT), local.get(key, _ABSENT))
                for key in different[:SHOWN_DIFFERENCES]
            )
            if len(different) > SHOWN_DIFFERENCES:
                text += f"; and {len(different) - SHOWN_DIFFERENCES} more"
            raise ConfigError(f"{text}. {_advice(different)}", **self._cluster.attributes(peer))
        self._compare_versions(peer, hello)

    def _compare_versions(self, peer: int, hello: dict[str, Any]) -> None:
        """Warns once per peer about versions that may differ."""
        if peer in self._compared:
            return
        self._compared.add(peer)
        local = local_versions()
        for name in MAY_DIFFER:
            if local[name] is not None and hello.get(name) not in (local[name], None):
                _log.warning(
                    "%s. Sums stay exact, but the results of local computation may differ. "
                    "Install the same version on all ranks",
                    self._difference(peer, name, hello[name], local[name]),
                )

    def _difference(self, peer: int, key: str, remote: Any, local: Any) -> str:
        """Describes a difference in rank order, so that both ranks report the same text."""
        if key == "rank":
            return (
                f"at the address of {self._cluster.describe(peer)} rank {_shown(remote)} answers"
            )
        values = dict(sorted({peer: remote, self._peers.rank: local}.items()))
        name = _NAMES.get(key, key if key in self.build() else _shown(key))
        if key == "ring" and isinstance(remote, list):
            name, values = _first_difference(values)
        quotes = "'" if key in local_versions() else ""
        return ", ".join(
            f"{self._cluster.describe(rank)} has {name} {_shown(value).strip(quotes)}"
            for rank, value in values.items()
        )


def _first_difference(rings: dict[int, list[Any]]) -> tuple[str, dict[int, Any]]:
    """Returns the first task in which the rings of two ranks differ; one may be longer."""
    first, second = rings.values()
    index = 0
    while [first[index : index + 1]] == [second[index : index + 1]]:
        index += 1
    tasks = {rank: (ring[index : index + 1] or [_ABSENT])[0] for rank, ring in rings.items()}
    return f"as task {index} of its ring", tasks


def _shown(value: Any) -> str:
    return "nothing" if value is _ABSENT else repr(value)[:SHOWN_CHARACTERS]


def _advice(different: Sequence[str]) -> str:
    if any(key in MUST_BE_SAME or key == "version" for key in different):
        return "Install the same version of hostopt on all ranks"
    if "ring" in different or "rank" in different:
        return 'Give all ranks the same "cluster" in TF_CONFIG'
    return "Give all ranks the same options"
