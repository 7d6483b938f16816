"""Overviews of a ring: an observer, which is no rank, asks one rank, and this one all others."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from typing import Any, Callable

from hostopt.cluster.cluster import Cluster
from hostopt.errors import AuthError, HostOptError, PeerLostError, ProtocolError
from hostopt.options import Options
from hostopt.transport import event_loop
from hostopt.transport.addresses import listens
from hostopt.transport.grpc import limits
from hostopt.transport.grpc import ring as ring_
from hostopt.transport.grpc.client import (
    HANDSHAKE_TIME,
    RpcClient,
    call_signed,
    message_options,
    open_channel,
)
from hostopt.transport.grpc.notes import read_details, read_overview
from hostopt.transport.grpc.ring import Ring
from hostopt.transport.grpc.runtime import grpc, keep_aio_running
from hostopt.transport.grpc.server import OBSERVE
from hostopt.transport.overview import Details, printable
from hostopt.transport.security import Authenticator, Identity, Security, probe

_MAX_RANKS = 4096
# Time to wait for the answer; longer than the rank waits for its peers.
ANSWER_S = 5.0
_CONNECT_S = 1.0
_ADVICE = (
    "Set HOSTOPT_TOKEN_FILE, HOSTOPT_TOKEN and HOSTOPT_TLS_DIR as for the ranks of the training"
)


def observe(address: str, options: Options, service: str = "hostopt.Ring") -> dict[str, Any]:
    """Asks a rank for an overview of its ring; its texts may contain any characters."""
    security = Security(Cluster.local(), options)
    return event_loop.run(_observe(address, options, security, service))


async def _observe(
    address: str, options: Options, security: Security, service: str
) -> dict[str, Any]:
    keep_aio_running()
    most_bytes = limits.most_overview_bytes(_MAX_RANKS)
    # gRPC uses the first of two equal options
    arguments = [HANDSHAKE_TIME, ("grpc.max_receive_message_length", most_bytes)]
    arguments += message_options(options, ring_.DEFAULT)
    channel = open_channel(address, arguments, security.tls)
    try:
        stub = channel.unary_unary(f"/{service}/{OBSERVE}")
        signer = Authenticator(Identity(-1, secrets.token_hex(8)), security, True)
        rank = Identity(-1, "")  # unknown, so it will be asked for
        answer = await call_signed(stub, signer, rank, OBSERVE, b"", timeout=ANSWER_S)
        if answer is None:
            fault = "answers without knowing the token of this command"
            raise AuthError(f"{address} {fault}. {_ADVICE}")
        return read_overview(answer, most_bytes)
    except grpc.aio.AioRpcError as error:
        raise await _error_of(address, error, security) from None
    except ValueError as error:
        raise ProtocolError(
            f"{address} has sent {error} instead of an overview. Check that a rank of the same "
            "version of hostopt listens there"
        ) from None
    finally:
        await channel.close()


async def _error_of(address: str, error: grpc.aio.AioRpcError, security: Security) -> HostOptError:
    code, codes = error.code(), grpc.StatusCode
    if code is codes.PERMISSION_DENIED:
        reason = printable(error.details() or "")
        return AuthError(f"{address} refuses this command: {reason}. {_ADVICE}")
    # a rank that closes its ring cancels the calls that it has not answered
    if code not in (codes.UNAVAILABLE, codes.DEADLINE_EXCEEDED, codes.CANCELLED):
        return ProtocolError(
            f"{address} has refused the call ({code.name}): another program listens there. Give "
            "the address of a rank"
        )
    fault = await probe(address, security.tls)
    if fault is not None:  # in words for a rank
        fault = fault.replace("this rank", "this command")
        return AuthError(f"{address} {fault}. {_ADVICE}")
    loop = asyncio.get_running_loop()
    if await loop.run_in_executor(None, listens, address, _CONNECT_S):
        return PeerLostError(
            f"{address} accepts connections but does not answer: its process is frozen, cannot "
            "run Python, or is not a rank. Ask another rank"
        )
    return PeerLostError(
        f"nothing listens at {address}. Check the address, and whether the training runs: "
        "evaluators, and trainings of one process, do not listen"
    )


class Observation:
    """The overview that one rank gives of its ring to all who ask; used on the event loop."""

    def __init__(
        self, ring: Ring, client: RpcClient, local_details: Callable[[], Details]
    ) -> None:
        self._ring = ring
        self._client = client
        self._peers = ring.peers
        self._local_details = local_details
        self._overview: asyncio.Future[bytes] | None = None  # the last one, or the one in progress
        self._began_s = 0.0

    async def on_details(self, _: bytes, __: grpc.aio.ServicerContext) -> bytes:
        """Answers a Details call of a peer."""
        return json.dumps(self._local_details()).encode()

    async def on_observe(self, _: bytes, __: grpc.aio.ServicerContext) -> bytes:
        """Answers an Observe call."""
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
            answer = await self._client.call(rank, "Details", b"", timeout_s)
            return read_details(answer, len(self._peers.cluster.ring))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"no answer for {timeout_s:g} s"
            return "not reachable" if self._peers.connected else "not connected yet"
        except (AuthError, ValueError):
            return "another program answers"
        except grpc.aio.UsageError:
            return "not reachable: the rank that was asked leaves the ring"
