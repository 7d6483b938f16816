"""The rendezvous: each rank calls the peers that it misses until all are connected.

In Hello messages each rank describes itself, and compares its description with its peers'.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from hostopt.errors import ConfigError, RendezvousTimeoutError
from hostopt.options import MAX_STREAMS, Options
from hostopt.shapes import Each, has_shape
from hostopt.transport.addresses import is_name
from hostopt.transport.frame import WIRE_VERSION
from hostopt.transport.grpc.client import RpcClient, challenger
from hostopt.transport.grpc.data_streams import OutgoingStreams
from hostopt.transport.grpc.limits import SHOWN_CHARACTERS, SHOWN_DIFFERENCES
from hostopt.transport.grpc.liveness import Liveness
from hostopt.transport.grpc.notes import HELLO, read_note
from hostopt.transport.grpc.ring import INCARNATION, Peers, Ring
from hostopt.transport.grpc.runtime import grpc
from hostopt.transport.security import probe
from hostopt.versions import MAY_DIFFER, MUST_BE_SAME, local_versions

_log = logging.getLogger(__name__)

_DIFFERS_BY_RANK = ("incarnation", "met", "data_port", "data_hosts", "data_streams", *MAY_DIFFER)
_MAX_PORT = (1 << 16) - 1
_NAMES = {"version": "wire version", "python": "Python", "tensorflow": "TensorFlow"}
_ABSENT = object()


class Rendezvous:
    """The rendezvous of one rank; used on the event loop. docs/wire.md (Hello) has the rules."""

    def __init__(
        self, ring: Ring, client: RpcClient, streams: OutgoingStreams, liveness: Liveness
    ) -> None:
        self._ring = ring
        self._peers = ring.peers
        self._client = client
        self._streams = streams
        self._liveness = liveness
        self.messages = HelloMessages(ring.peers, ring.options)

    async def on_hello(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Answers a Hello message with this rank's."""
        peers = self._peers
        try:
            hello = self.messages.read(request)
        except ValueError:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "this is not a rank of this ring"
            )
        peer, incarnation = hello["rank"], hello["incarnation"]
        if peers.is_restarted(peer, incarnation) and not self._ring.mailbox.has_left(peer):
            await self._liveness.check_restart(peer, incarnation)
        # other callers see by the answer that they are strangers, or have to wait
        if peer in peers.missing and not peers.is_restarted(peer, incarnation):
            try:
                self.messages.check(peer, hello)
            except ConfigError as error:
                self._ring.abort(error)
            peers.add(peer, hello)
            if peer != peers.successor:  # which must read this rank's stream first
                peers.missing.discard(peer)
        return json.dumps(self.messages.build(to=peer)).encode()

    async def run(self) -> None:
        """Sends Hello messages until all peers are connected, which are watched from then on."""
        started = time.monotonic()
        report_at_s = self._ring.timing.progress_every_s
        missing, rank = self._peers.missing, self._peers.rank
        while missing and self._ring.mailbox.error is None:
            await asyncio.gather(*map(self._greet, list(missing)))
            waited_s = time.monotonic() - started
            names = self._peers.missing_names()
            if names and waited_s >= self._ring.options.rendezvous_timeout_s:
                raise RendezvousTimeoutError(
                    f"{self._peers.cluster.describe(rank)} has waited {waited_s:.0f} s, missing: "
                    f"{names}. Start them, or correct their addresses in TF_CONFIG",
                    **self._peers.cluster.attributes(min(missing)),
                    root_cause=f"missing: {names}",
                )
            if names and waited_s >= report_at_s:
                _log.warning("rank %d has waited %.0f s, missing: %s", rank, waited_s, names)
                report_at_s += self._ring.timing.progress_every_s
        if self._ring.mailbox.error is not None:
            raise self._ring.mailbox.error
        self._peers.connected = True
        self._liveness.start()

    async def _greet(self, peer: int) -> None:
        peers = self._peers
        timeout_s = min(self._ring.timing.hello_timeout_s, self._ring.options.rendezvous_timeout_s)
        answer = await self._call_hello(peer, timeout_s)
        await self._check_certificates(peer, bool(answer))
        if self._ring.mailbox.has_left(peer):
            peers.missing.discard(peer)
        if not answer or peer not in peers.missing:
            return
        try:
            hello = self.messages.read(answer)
        except ValueError:
            await self._retry_elsewhere(peer, "runs another program")
            return
        if hello["rank"] != peer:
            await self._on_other_rank(peer, hello["rank"])
            return
        if hello.get("met") != peers.incarnation:  # it is still in an earlier ring
            reason = "is connected to an earlier incarnation of this rank, and has to end first"
            await self._retry_later(peer, reason)
            return
        peers.reasons.pop(peer, None)
        self.messages.check(peer, hello)
        if peers.is_restarted(peer, hello["incarnation"]):
            if self._ring.mailbox.error is not None:  # it has begun the next ring
                return
            self._liveness.forget(peer)
        peers.add(peer, hello)
        if peer == peers.successor:
            stream = self._streams.to(peer)
            if stream is None or not await stream.wait_until_open(timeout_s):
                return
        peers.missing.discard(peer)

    async def _call_hello(self, peer: int, timeout_s: float) -> bytes:
        """Returns the answer of a peer; empty if there is none."""
        request = json.dumps(self.messages.build()).encode()
        try:
            return await self._client.call(peer, "Hello", request, timeout_s, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            code, rank = error.code(), challenger(error)
            if code is grpc.StatusCode.UNAUTHENTICATED and rank not in (-1, peer):
                await self._on_other_rank(peer, rank)
            # the doctor, a stranger, or this rank
            if code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT):
                await self._retry_elsewhere(peer, "runs another program")
            return b""

    async def _on_other_rank(self, peer: int, rank: int) -> None:
        """Raises ConfigError, unless the name of a peer that has moved may soon lead to it."""
        if not is_name(self._peers.cluster.ring[peer].address):
            self.messages.check(peer, {**self.messages.build(), "rank": rank})
        await self._retry_elsewhere(peer, f"leads to rank {rank}")

    async def _retry_elsewhere(self, peer: int, reason: str) -> None:
        if is_name(self._peers.cluster.ring[peer].address):
            await asyncio.sleep(self._ring.timing.hello_timeout_s)
            await self._client.reopen(peer)
        await self._retry_later(peer, reason)

    async def _retry_later(self, peer: int, reason: str) -> None:
        self._peers.reasons[peer] = reason
        await asyncio.sleep(self._ring.timing.retry_after_s)

    async def _check_certificates(self, peer: int, has_answered: bool) -> None:
        """Raises AuthError if certificates are the reason why a peer does not answer or call."""
        fault, peers = None, self._peers
        if not has_answered and peer in peers.missing:
            fault = await probe(peers.cluster.ring[peer].address, self._ring.security.tls)
        if self._ring.security.local_fault is not None and (has_answered or fault):
            local_fault = f"is refused by others: {self._ring.security.local_fault}"
            raise self._ring.auth_error(peers.rank, local_fault)
        if fault is not None:
            raise self._ring.auth_error(peer, fault)


class HelloMessages:
    """Builds, reads and compares the Hello messages of one rank."""

    def __init__(self, peers: Peers, options: Options) -> None:
        self._peers = peers
        self._cluster = peers.cluster
        self._options = options
        self._compared: set[int] = set()  # peers whose versions have been compared

    def build(self, to: int | None = None) -> dict[str, Any]:
        """Describes this rank, in types that JSON supports; `to` is the rank of an answer."""
        options = self._options
        hello = {
            **local_versions(),
            "version": WIRE_VERSION,
            "rank": self._peers.rank,
            "incarnation": self._peers.incarnation,
            "data_port": self._peers.data_port,
            "data_hosts": self._peers.data_hosts,
            "data_streams": self._peers.most_streams,
            "ring": [str(task) for task in self._cluster.ring],
            "timeline": options.timeline is not None,  # all ranks must compare their clocks
            **options.same_on_all_ranks(),
        }
        return hello if to is None else {**hello, "met": self._peers.incarnations.get(to, "")}

    def read(self, data: bytes) -> dict[str, Any]:
        """Reads the Hello message of a peer; only `check` compares its fields with this rank's."""
        hello = read_note(data, self._peers.most_note_bytes, HELLO)
        # `check` names an older version of hostopt
        port, streams = hello.setdefault("data_port", 0), hello.setdefault("data_streams", 1)
        if not has_shape(port, int) or not 0 <= port <= _MAX_PORT:
            raise ValueError("a Hello message with a data port that does not exist")
        if not has_shape(streams, int) or not 1 <= streams <= MAX_STREAMS:
            raise ValueError("a Hello message with a number of streams that is not allowed")
        hosts = hello.setdefault("data_hosts", [])
        if not has_shape(hosts, Each(str)) or any(is_name(f"{host}:0") for host in hosts):
            raise ValueError("a Hello message with data hosts that are not addresses")
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
        describe = self._cluster.describe
        if key == "rank":
            return f"at the address of {describe(peer)} rank {_shown(remote)} answers"
        values = dict(sorted({peer: remote, self._peers.rank: local}.items()))
        name = _NAMES.get(key, key if key in self.build() else _shown(key))
        if key == "ring" and isinstance(remote, list):
            name, values = _first_difference(values)
        quotes = "'" if key in local_versions() else ""
        return ", ".join(
            f"{describe(rank)} has {name} {_shown(value).strip(quotes)}"
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
