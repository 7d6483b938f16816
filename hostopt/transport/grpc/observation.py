"""Answers observers: one rank asks all others for their details, and answers for the ring."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Callable

from hostopt.errors import AuthError
from hostopt.transport.grpc import limits
from hostopt.transport.grpc.notes import read_details
from hostopt.transport.grpc.ring_context import RingContext
from hostopt.transport.grpc.runtime import grpc
from hostopt.transport.overview import Details


class Observation:
    """The overview that one rank gives of its ring; used on the event loop.

    Observers that ask at the same time get the same overview, so strangers cannot make this rank
    ask its peers more often than `limits.OBSERVE_EVERY_S`.
    """

    def __init__(self, ring: RingContext, local_details: Callable[[], Details]) -> None:
        self._ring = ring
        self._peers = ring.peers
        self._local_details = local_details
        self._overview: asyncio.Future[bytes] | None = None  # the last one, or the one in progress
        self._began_s = 0.0

    async def on_details(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Answers a Details call of a peer."""
        del request, context
        return json.dumps(self._local_details()).encode()

    async def on_observe(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Answers an Observe call."""
        del request, context
        now_s = time.monotonic()
        if self._overview is None or (
            self._overview.done() and now_s >= self._began_s + limits.OBSERVE_EVERY_S
        ):
            self._began_s = now_s
            self._overview = asyncio.ensure_future(self._ask_all())
        return await asyncio.shield(self._overview)  # others may wait for it if this caller leaves

    async def _ask_all(self) -> bytes:
        ring = self._peers.cluster.ring
        ranks = await asyncio.gather(*map(self._details_of, range(len(ring))))
        tasks = [{"task": task.name, "address": task.address} for task in ring]
        return json.dumps({"ring": tasks, "ranks": ranks}).encode()

    async def _details_of(self, rank: int) -> Details | str:
        """Returns the details of a rank, or the reason why there are none."""
        if rank == self._peers.rank:
            return self._local_details()
        if self._ring.mailbox.has_left(rank):
            return "has left the ring"
        timeout_s = self._ring.timing.details_timeout_s
        try:
            answer = await self._ring.client.call(rank, "Details", b"", timeout_s)
            return read_details(answer, len(self._peers.cluster.ring))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"no answer for {timeout_s:g} s"
            return "not reachable" if self._peers.connected else "not connected yet"
        except (AuthError, ValueError):
            return "another program answers"
        except grpc.aio.UsageError:
            return "not reachable: the rank that was asked leaves the ring"
