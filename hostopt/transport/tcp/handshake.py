"""The handshake of a data connection: both sides prove that they are the ranks of this ring.

    caller -> called   greeting: magic, wire version, rank, number of the stream, both
                       incarnations, a nonce
    called -> caller   a nonce, and a proof
    caller -> called   a proof
    called -> caller   one byte: accepted
    caller -> called   one byte: confirmed

Both sides agree on the result: the caller uses the connection once it has confirmed, and the
called rank once it has the confirmation.

A proof is an HMAC of the greeting and the nonce of the called rank, under the token that all ranks
share. Without a token it is zeros, and only the incarnations, which are random numbers, identify
the ranks. A recorded handshake is useless, as nonces and incarnations are new each time.
"""

from __future__ import annotations

import secrets
import struct
from typing import Callable

from hostopt.transport.frame import WIRE_VERSION
from hostopt.transport.security import Identity, Security
from hostopt.transport.tcp.data_socket import DataSocket

_MAGIC = b"HOD"
_GREETING = struct.Struct("<3sBIBQQ16s")
_NONCE_BYTES, _PROOF_BYTES = 16, 64
_ACCEPTED, _CONFIRMED = b"\x01", b"\x03"
_CALLED, _CALLER = "data of called", "data of caller"


class HandshakeError(ConnectionError):
    """The other side of a data connection is not a rank of this ring."""


async def introduce(
    connection: DataSocket, caller: Identity, called: Identity, security: Security, stream: int = 0
) -> None:
    """Proves to a peer that this rank calls it for a stream, and checks that it is the peer."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    incarnations = (int(each.incarnation, 16) for each in (caller, called))
    greeting = _GREETING.pack(_MAGIC, WIRE_VERSION, caller.rank, stream, *incarnations, nonce)
    await connection.write([greeting])
    answer = await connection.read_exactly(_NONCE_BYTES + _PROOF_BYTES)
    signed = greeting + answer[:_NONCE_BYTES]
    if not security.is_proof(
        answer[_NONCE_BYTES:], *_fields(_CALLED, caller, called), body=signed
    ):
        raise HandshakeError("it does not know the token of this rank")
    proof = security.proof(*_fields(_CALLER, caller, called), body=signed)
    await connection.write([proof.encode()])
    if await connection.read_exactly(len(_ACCEPTED)) != _ACCEPTED:
        raise HandshakeError("another program answers")
    await connection.write([_CONFIRMED])  # one byte, which the buffers of the kernel always take


async def identify(
    connection: DataSocket,
    called: Identity,
    incarnation_of: Callable[[int], str | None],
    security: Security,
) -> tuple[int, int]:
    """Returns the rank and the stream of the peer that connects; `accept` must follow."""
    greeting = await connection.read_exactly(_GREETING.size)
    magic, version, rank, stream, from_, to, _ = _GREETING.unpack(greeting)
    if magic != _MAGIC or version != WIRE_VERSION:
        raise HandshakeError("another program calls")
    incarnation = incarnation_of(rank)
    if incarnation is None or (int(incarnation, 16), int(called.incarnation, 16)) != (from_, to):
        raise HandshakeError(f"the caller claims to be rank {rank} of another ring")
    caller = Identity(rank, incarnation)
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    signed = greeting + own_nonce
    own_proof = security.proof(*_fields(_CALLED, caller, called), body=signed)
    await connection.write([own_nonce, own_proof.encode()])
    proof = await connection.read_exactly(_PROOF_BYTES)
    if not security.is_proof(proof, *_fields(_CALLER, caller, called), body=signed):
        raise HandshakeError(f"the caller claims to be rank {rank}, but has another token")
    return rank, stream


async def accept(connection: DataSocket) -> None:
    """Accepts the connection of a peer that `identify` has checked."""
    await connection.write([_ACCEPTED])
    if await connection.read_exactly(len(_CONFIRMED)) != _CONFIRMED:
        raise HandshakeError("the caller does not confirm the connection")


def _fields(kind: str, caller: Identity, called: Identity) -> tuple[str, ...]:
    return (kind, str(caller.rank), str(called.rank), caller.incarnation, called.incarnation)
