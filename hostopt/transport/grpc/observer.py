"""Asks one rank for an overview of its ring. The caller is not a rank."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from hostopt.cluster.cluster import Cluster
from hostopt.errors import AuthError, HostOptError, PeerLostError, ProtocolError
from hostopt.options import Options
from hostopt.transport import event_loop
from hostopt.transport.greeting import listens
from hostopt.transport.grpc import limits, timing
from hostopt.transport.grpc.authentication import ObserverProofs
from hostopt.transport.grpc.channel_options import message_options
from hostopt.transport.grpc.client import HANDSHAKE_TIME, open_channel
from hostopt.transport.grpc.notes import read_overview
from hostopt.transport.grpc.peers import INCARNATION
from hostopt.transport.grpc.runtime import grpc, keep_aio_running
from hostopt.transport.grpc.server import OBSERVE
from hostopt.transport.overview import printable
from hostopt.transport.security import Security, probe

_MAX_RANKS = 4096
# Time to wait for the answer; longer than the rank waits for its peers.
ANSWER_S = 5.0
_CONNECT_S = 1.0
_ADVICE = (
    "Set HOSTOPT_TOKEN_FILE, HOSTOPT_TOKEN and HOSTOPT_TLS_DIR as for the ranks of the training"
)


def observe(address: str, options: Options, service: str = "hostopt.Ring") -> dict[str, Any]:
    """Asks a rank for an overview of its ring.

    Returns:
      The overview: see `notes.read_overview`. Its texts may contain any characters.

    Raises:
      ConfigError: the token or the certificates cannot be used.
      PeerLostError: nothing listens at the address, or it does not answer.
      AuthError: the rank refuses this caller, or does not know the token.
      ProtocolError: another program answers.
    """
    security = Security(Cluster.local(), options)
    return event_loop.run(_observe(address, options, security, service))


async def _observe(
    address: str, options: Options, security: Security, service: str
) -> dict[str, Any]:
    keep_aio_running()
    most_bytes = limits.most_overview_bytes(_MAX_RANKS)
    channel = open_channel(
        address,
        # gRPC uses the first of two equal options
        [
            HANDSHAKE_TIME,
            ("grpc.max_receive_message_length", most_bytes),
            *message_options(options, timing.DEFAULT),
        ],
        security.tls,
    )
    try:
        answer = await _call(channel, address, security, service)
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


async def _call(channel: Any, address: str, security: Security, service: str) -> bytes:
    """Calls the rank, again if it asks for a proof that is made for its incarnation."""
    proofs = ObserverProofs(security, OBSERVE, secrets.token_hex(8))
    stub, request, incarnation = channel.unary_unary(f"/{service}/{OBSERVE}"), b"", ""
    for is_last in (False, True):
        metadata = proofs.call_metadata(incarnation, request)
        call = stub(request, metadata=metadata, timeout=ANSWER_S)
        try:
            answer: bytes = await call
            break
        except grpc.aio.AioRpcError as error:
            challenge = INCARNATION.fullmatch(error.details() or "")
            if is_last or error.code() is not grpc.StatusCode.UNAUTHENTICATED or not challenge:
                raise
            incarnation = challenge[0]
    if not proofs.is_answer(incarnation, answer, await call.trailing_metadata()):
        raise AuthError(f"{address} answers without knowing the token of this command. {_ADVICE}")
    return answer


async def _error_of(address: str, error: grpc.aio.AioRpcError, security: Security) -> HostOptError:
    """Returns the error to report if a call has failed."""
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
