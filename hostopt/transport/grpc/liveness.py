"""Peers that leave: with a Leave message, in good order or with an error, or without, lost.

A broken connection alone does not abort the ring: this rank waits for a moment, as the peer's
Leave message with the reason, or another rank's error, may be on its way.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import enum
import json
import logging
from typing import Any

from hostopt.errors import AuthError, HostOptError, PeerLostError, error_from_dict, error_to_dict
from hostopt.telemetry.flight_recorder import FlightRecorder
from hostopt.transport import event_loop
from hostopt.transport.addresses import is_silent
from hostopt.transport.grpc.client import RpcClient
from hostopt.transport.grpc.data_streams import OutgoingStreams
from hostopt.transport.grpc.notes import read_leave, read_status
from hostopt.transport.grpc.ring import Ring
from hostopt.transport.grpc.runtime import grpc
from hostopt.transport.stall import Status

_log = logging.getLogger(__name__)

_SILENT = "no answer to ping, its process is frozen, or its host or link is silent"
_INCARNATION_CHANGED = "incarnation changed, its process was started again"


class PeerState(enum.Enum):
    """The state of a peer whose connection broke."""

    GONE = "its process is gone, or another one listens there"
    SILENT = "it does not answer"
    ALIVE = "it answers"


class Liveness:
    """Watches the peers of one rank; used on the event loop."""

    def __init__(
        self, ring: Ring, client: RpcClient, streams: OutgoingStreams, recorder: FlightRecorder
    ) -> None:
        self._ring = ring
        self._client = client
        self._streams = streams
        self._peers = ring.peers
        self._recorder = recorder
        self._watches: list[asyncio.Future[None]] = []
        self.closed = False  # True once this rank leaves the ring

    async def request_status(self, peer: int, **message: Any) -> Status | None:
        """Returns the status of a peer, for a message if one is given; None without an answer."""
        timeout_s = self._ring.timing.status_timeout_s
        calling = self._call_status(peer, message, timeout_s)
        try:
            # an error must be found even if gRPC loses the end of a call
            return await asyncio.wait_for(calling, 2 * timeout_s)
        except (grpc.aio.AioRpcError, AuthError, ValueError, asyncio.TimeoutError):
            return None

    async def _call_status(self, peer: int, message: dict[str, Any], timeout_s: float) -> Status:
        data = json.dumps(message).encode()
        answer = await self._client.call(peer, "Status", data, timeout_s)
        size, most_bytes = self._peers.cluster.size, self._peers.most_note_bytes
        return read_status(answer, most_bytes, size, for_message=bool(message))

    def start(self) -> None:
        """Watches the connections to all peers, once the rendezvous is complete."""
        self._watches = [
            asyncio.ensure_future(self._watch(peer)) for peer in self._client.channels
        ]

    def stop(self) -> None:
        """Stops watching."""
        for watch in self._watches:
            watch.cancel()

    async def _watch(self, peer: int) -> None:
        """Declares a peer lost if the connection that gRPC pings breaks and the peer is gone."""
        channel, was_ready = self._client.channels[peer], False
        while True:
            connectivity = channel.get_state(try_to_connect=True)
            is_ready = connectivity is grpc.ChannelConnectivity.READY
            if was_ready and not is_ready:
                error, state = await self._examine(peer, "connection reset")
                if state is not PeerState.ALIVE:
                    await self._lose(peer, error, state)
                    return
            if is_ready and not was_ready:  # the peer closes connections without calls
                await self.request_status(peer)
            was_ready = is_ready
            await channel.wait_for_state_change(connectivity)

    async def stream_broken(self, peer: int, reason: str) -> None:
        """Handles a broken stream to or from a peer, unless the peer has left in good order."""
        if not self.closed and not self._ring.mailbox.has_left(peer):
            await self._lose(peer, *await self._examine(peer, reason))

    async def check_restart(self, peer: int, incarnation: str) -> None:
        """Checks the claim that a peer has been started again, by a call to its address."""
        status = await self.request_status(peer)
        if status is None or status["incarnation"] != incarnation:
            return  # a stranger, such as the same task on another host
        if not self._peers.connected:
            if self._ring.mailbox.error is None:  # else it waits in the next ring
                self.forget(peer)
        else:  # its broken connection has not been detected yet
            self._peers.gone.add(peer)
            self._ring.abort(self._lost_error(peer, _INCARNATION_CHANGED))

    def forget(self, peer: int) -> None:
        """Removes the state of a peer that has been started again during the rendezvous."""
        self._peers.forget(peer)
        self._ring.mailbox.forget(peer)
        self._streams.forget(peer)

    async def _lose(self, peer: int, error: HostOptError, state: PeerState) -> None:
        """Aborts the ring, unless a Leave message or another error arrives first."""
        incarnation = self._peers.incarnations.get(peer)
        # A peer that is alive may find this rank gone: its message has the better reason.
        messages = 3 if state is PeerState.ALIVE else 1
        await asyncio.sleep(messages * self._ring.timing.last_message_s)
        if self.closed or self._ring.mailbox.has_left(peer):
            if state is not PeerState.ALIVE:
                self._streams.cancel(peer)  # nobody takes its frames any more
        elif self._peers.connected:
            if state is PeerState.GONE:
                self._peers.gone.add(peer)
            self._ring.abort(error)
        elif incarnation == self._peers.incarnations.get(peer):
            # The peer may only be slow, and its messages are still wanted. If it has been started
            # again, its next Hello message says so.
            _log.warning("during the rendezvous: %s", error)
            self._peers.missing.add(peer)
            self._streams.forget(peer)

    async def _examine(self, peer: int, reason: str) -> tuple[HostOptError, PeerState]:
        """Finds the state of a peer whose connection broke, and the error to report."""
        try:
            status = await self._call_status(peer, {}, self._ring.timing.last_message_s)
            incarnation = status["incarnation"]
        except grpc.aio.AioRpcError as error:
            if await self._is_silent(peer, error, reason):
                return self._lost_error(peer, _SILENT), PeerState.SILENT
            gone = f"connection reset, process gone ({reason})"
            return self._lost_error(peer, gone), PeerState.GONE
        except (AuthError, ValueError):
            incarnation = None  # another program listens there
        if incarnation != self._peers.incarnations.get(peer):
            return self._lost_error(peer, _INCARNATION_CHANGED), PeerState.GONE
        if status["error"]:  # it has aborted the ring, and its Leave message is on its way
            return error_from_dict(status["error"]), PeerState.ALIVE
        # Each of the two ranks finds the other alive, so both blame the higher rank.
        ends = sorted((self._peers.rank, peer))
        between = " and ".join(map(self._peers.cluster.describe, ends))
        broken = f"the connection between {between} broke ({reason}), though both are alive"
        return self._lost_error(ends[1], broken, between), PeerState.ALIVE

    async def _is_silent(self, peer: int, error: grpc.aio.AioRpcError, reason: str) -> bool:
        """Returns True if a peer is not gone, but does not answer."""
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return True
        details = f"{reason}, {error.details()}".lower()
        if "ping" in details or "keepalive" in details:
            return True
        # gRPC only says that it cannot connect again
        address = self._peers.cluster.ring[peer].address
        return await is_silent(address, self._ring.timing.last_message_s)

    def _lost_error(self, peer: int, reason: str, between: str = "") -> PeerLostError:
        cluster, rank = self._peers.cluster, self._peers.rank
        attributes, at = cluster.attributes(peer), ""
        waits, last = self._ring.mailbox.waits(), self._recorder.last
        if waits:
            tag, name = waits[0].tag, waits[0].name
            attributes |= {"step": tag.step, "bucket": tag.bucket}
            at = f" at step {tag.step} while rank {rank} waited for {name or 'data'} ({tag})"
        elif last is not None:
            attributes |= {"step": last.tag.step, "bucket": last.tag.bucket}
            at = f" at step {last.tag.step}, after rank {rank} had {last.kind} {last.name}"
        lost = f"connection between {between}" if between else cluster.describe(peer)
        return PeerLostError(
            f"{cluster.describe(peer)} lost{at}: {reason}. Found by {cluster.describe(rank)}. "
            f"Check the output of rank {peer}",
            **attributes,
            root_cause=f"{lost} lost",
        )


class Departure:
    """Sends and receives the Leave messages of one rank."""

    def __init__(self, ring: Ring, client: RpcClient, streams: OutgoingStreams) -> None:
        self._ring = ring
        self._client = client
        self._streams = streams
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
        return self._client.channels.keys() - self._peers.gone

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
            await self._client.call(peer, "Leave", data, timeout_s, wait_for_ready=True)

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
        self._ring.mailbox.mark_left(sender)
        self._streams.cancel(sender)  # the peer takes no more frames
        return b""

    def _is_current(self, message: dict[str, Any]) -> bool:
        """Returns True unless a message comes from, or is meant for, an earlier incarnation."""
        peers, incarnation = self._peers, message["from"]
        is_sender = incarnation == peers.incarnations.get(message["sender"], incarnation)
        if message["to"] == peers.incarnation and is_sender:
            return True
        # a failed rendezvous does not know this rank's incarnation
        return message["to"] is None and not peers.connected
