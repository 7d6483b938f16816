"""Leave messages: a rank says goodbye to its peers, or sends the error that aborted the ring."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
from typing import Any

from hostopt.errors import AuthError, HostOptError, error_to_dict
from hostopt.transport import event_loop
from hostopt.transport.grpc.notes import read_leave
from hostopt.transport.grpc.ring_context import RingContext
from hostopt.transport.grpc.runtime import grpc


class Departure:
    """Sends and receives the Leave messages of one rank."""

    def __init__(self, ring: RingContext) -> None:
        self._ring = ring
        self._peers = ring.peers
        self._sending: list[concurrent.futures.Future[None]] = []

    def send_error(self, error: HostOptError) -> None:
        """Starts to send the aborting error to all peers; may be called from any thread."""
        for peer in self._remaining_peers():
            self._sending.append(event_loop.start(self._send(peer, error_to_dict(error))))

    async def send_goodbye(self) -> None:
        """Sends a Leave message without an error to all peers."""
        await asyncio.gather(*map(self._send, self._remaining_peers()))

    async def wait_until_sent(self) -> None:
        """Waits for the messages of `send_error`, until the deadline."""
        if self._sending:
            sending = [asyncio.wrap_future(each) for each in self._sending]
            await asyncio.wait(sending, timeout=self._ring.timing.leave_timeout_s)

    def _remaining_peers(self) -> set[int]:
        return self._ring.client.channels.keys() - self._peers.gone

    async def _send(self, peer: int, error: dict[str, Any] | None = None) -> None:
        message: dict[str, Any] = {
            "sender": self._peers.rank,
            "from": self._peers.incarnation,
            "to": self._peers.incarnations.get(peer),
        }
        if error:
            message["error"] = error
        data = json.dumps(message, default=str).encode()
        timing = self._ring.timing
        timeout_s = timing.leave_timeout_s if self._peers.connected else timing.last_message_s
        with contextlib.suppress(grpc.aio.AioRpcError, AuthError):
            await self._ring.client.call(peer, "Leave", data, timeout_s, wait_for_ready=True)

    async def on_leave(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Handles a Leave message."""
        try:
            message, error = read_leave(request, self._peers.most_note_bytes)
            sender, is_peer = message["sender"], message["sender"] in self._peers
        except ValueError:
            is_peer = False
        if not is_peer:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "this is not a Leave message of a peer"
            )
        if not self._is_current(message):
            return b""
        self._peers.gone.add(sender)
        if error is not None:
            self._ring.abort(error)  # also sends it on, as the sender may not reach all ranks
            return b""
        self._ring.mailbox.mark_left(sender, "it has closed its communicator")
        self._ring.streams.cancel(sender)  # the peer takes no more frames
        return b""

    def _is_current(self, message: dict[str, Any]) -> bool:
        """Returns True unless a message comes from, or is meant for, an earlier incarnation."""
        peers, incarnation = self._peers, message["from"]
        is_sender = incarnation == peers.incarnations.get(message["sender"], incarnation)
        if message["to"] == peers.incarnation and is_sender:
            return True
        # a failed rendezvous does not know this rank's incarnation
        return message["to"] is None and not peers.connected
