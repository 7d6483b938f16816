"""Messages of one collective call, as the flight recorder and the timeline show them."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.collectives.ring_schedule import segments
from hostopt.errors import ProtocolError
from hostopt.telemetry.timeline import Track
from hostopt.transport.base import Transport
from hostopt.transport.message import Payload, Tag


class CallMessages:
    """Sends and receives the messages of one collective call; coroutines for the event loop."""

    def __init__(self, transport: Transport, call: CollectiveCall) -> None:
        self._transport = transport
        self._call = call

    async def send(
        self, peer: int, tag: Tag, payload: Payload, phase: str, lazily: bool = False
    ) -> None:
        """Sends contiguous bytes; see `Transport.send`."""
        begin_s = time.monotonic()
        name = self._call.in_phase(phase)
        await self._transport.send(peer, tag, payload, name, lazily)
        self._transport.recorder.record("sent", peer, name, tag, len(payload))
        self._trace(Track.RING_SEND, tag, begin_s, len(payload))

    async def receive(
        self, peer: int, tag: Tag, phase: str, into: memoryview | None = None
    ) -> memoryview:
        """Receives a message of any length, read-only, in `into` or elsewhere."""
        begin_s = time.monotonic()
        name = self._call.in_phase(phase)
        payload = await self._transport.recv(peer, tag, name, into)
        self._transport.recorder.record("received", peer, name, tag, len(payload))
        self._trace(Track.RING_RECEIVE, tag, begin_s, len(payload))
        return payload

    def sending(self, peer: int, phase: str) -> contextlib.AbstractAsyncContextManager[None]:
        """The scope of lazy sends to a peer; see `Transport.sending`."""
        return self._transport.sending(peer, self._call.tag(), self._call.in_phase(phase))

    async def send_array(
        self, peer: int, tag: Tag, array: Array, phase: str, lazily: bool = False
    ) -> None:
        """Sends a contiguous array of shape [n]; see `send`."""
        await self.send(peer, tag, array.view(np.uint8).data, phase, lazily)

    async def receive_array(
        self,
        peer: int,
        tag: Tag,
        size: int,
        dtype: np.dtype[Any],
        phase: str,
        into: Array | None = None,
        scratch: Array | None = None,
    ) -> Array:
        """Receives an array of `size` elements, in the contiguous array `into` if there is one.

        Otherwise the result is read-only, and valid until `scratch`, of at least this size, is
        used again. A message of another length aborts the ring.
        """
        memory = scratch[:size] if into is None and scratch is not None else into
        offered = None if memory is None else memory.view(np.uint8).data
        payload = await self.receive(peer, tag, phase, offered)
        nbytes = size * dtype.itemsize
        if len(payload) != nbytes:
            transport = self._transport
            error = ProtocolError(
                f"rank {transport.rank} expected {nbytes} bytes of {self._call.name} from "
                f"{transport.cluster.describe(peer)} at {tag}, got {len(payload)}. Run the same "
                "version of hostopt on all ranks",
                rank=peer,
                step=tag.step,
                bucket=tag.bucket,
            )
            transport.abort(error)
            raise error
        if into is None:
            return np.frombuffer(payload, dtype=dtype)
        if payload is not offered:
            into[:] = np.frombuffer(payload, dtype=dtype)
        return into

    async def send_segments(self, peer: int, flat: Array) -> None:
        """Sends an array of shape [n] to a rank that calls `receive_segments`."""
        for segment, part in segments(flat, self._transport.segment_bytes):
            await self.send_array(peer, self._call.tag(0, 0, segment), part, "send")

    async def receive_segments(self, peer: int, flat: Array) -> None:
        """Receives an array of shape [n], in place, from a rank that calls `send_segments`."""
        for segment, part in segments(flat, self._transport.segment_bytes):
            tag = self._call.tag(0, 0, segment)
            await self.receive_array(peer, tag, part.size, flat.dtype, "send", into=part)

    def _trace(self, track: Track, tag: Tag, begin_s: float, nbytes: int) -> None:
        timeline = self._transport.timeline
        if timeline is not None:
            timeline.message(track, tag, self._call.name, begin_s, time.monotonic(), nbytes)
