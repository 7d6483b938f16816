"""The rendezvous: each rank calls the peers that it misses until all are connected."""

from __future__ import annotations

import asyncio
import json
import logging
import time

from hostopt.errors import ConfigError, RendezvousTimeoutError
from hostopt.options import Options
from hostopt.transport.grpc.hello import HelloMessages
from hostopt.transport.grpc.liveness import Liveness
from hostopt.transport.grpc.ring_context import RingContext
from hostopt.transport.grpc.runtime import grpc
from hostopt.transport.security import Security, probe

_log = logging.getLogger(__name__)


class Rendezvous:
    """The rendezvous of one rank; used on the event loop.

    A peer is connected once it has answered a Hello message, or has sent one. The successor must
    also have begun to read this rank's stream, so that each of the two detects the other's end.
    """

    def __init__(
        self, ring: RingContext, liveness: Liveness, security: Security, options: Options
    ) -> None:
        self._ring = ring
        self._peers = ring.peers
        self._liveness = liveness
        self._security = security
        self._options = options
        self.messages = HelloMessages(ring.peers, options)

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
        if peer in peers.missing:  # later callers are strangers; they see it by the answer
            try:
                self.messages.check(peer, hello)
            except ConfigError as error:
                self._ring.abort(error)
            peers.add(peer, hello)
            if peer != peers.successor:  # which must read this rank's stream first
                peers.missing.discard(peer)
        return json.dumps(self.messages.build(to=peer)).encode()

    async def run(self) -> None:
        """Sends Hello messages until all peers are connected."""
        started = time.monotonic()
        report_at_s = self._ring.timing.progress_every_s
        missing, rank = self._peers.missing, self._peers.rank
        while missing and self._ring.mailbox.error is None:
            await asyncio.gather(*map(self._greet, list(missing)))
            waited_s = time.monotonic() - started
            names = self._peers.missing_names()
            if names and waited_s >= self._options.rendezvous_timeout_s:
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

    async def _greet(self, peer: int) -> None:
        """Sends one Hello message to a missing peer, and handles the answer."""
        peers = self._peers
        timeout_s = min(self._ring.timing.hello_timeout_s, self._options.rendezvous_timeout_s)
        answer = await self._call_hello(peer, timeout_s)
        await self._check_certificates(peer, bool(answer))
        if self._ring.mailbox.has_left(peer):
            peers.missing.discard(peer)
        if not answer or peer not in peers.missing:
            return
        try:
            hello = self.messages.read(answer)
        except ValueError:
            await self._retry_later(peer, "runs another program")
            return
        if hello.get("met") != peers.incarnation:  # it is still in an earlier ring
            reason = "is connected to an earlier incarnation of this rank, and has to end first"
            await self._retry_later(peer, reason)
            return
        peers.reasons.pop(peer, None)
        self.messages.check(peer, hello)
        if peers.is_restarted(peer, hello["incarnation"]):
            self._liveness.forget(peer)
        peers.add(peer, hello)
        if peer != peers.successor or await self._ring.streams.to(peer).wait_until_open(timeout_s):
            peers.missing.discard(peer)

    async def _call_hello(self, peer: int, timeout_s: float) -> bytes:
        """Returns the answer of a peer; empty if there is none."""
        request = json.dumps(self.messages.build()).encode()
        try:
            return await self._ring.client.call(
                peer, "Hello", request, timeout_s, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # the doctor, or a stranger
                await self._retry_later(peer, "runs another program")
            return b""

    async def _retry_later(self, peer: int, reason: str) -> None:
        self._peers.reasons[peer] = reason
        await asyncio.sleep(self._ring.timing.retry_after_s)

    async def _check_certificates(self, peer: int, has_answered: bool) -> None:
        """Raises AuthError if certificates are the reason why a peer does not answer or call."""
        fault, peers = None, self._peers
        if not has_answered and peer in peers.missing:
            fault = await probe(peers.cluster.ring[peer].address, self._security.tls)
        if self._security.local_fault is not None and (has_answered or fault):
            local_fault = f"is refused by others: {self._security.local_fault}"
            raise self._ring.client.auth_error(peers.rank, local_fault)
        if fault is not None:
            raise self._ring.client.auth_error(peer, fault)
