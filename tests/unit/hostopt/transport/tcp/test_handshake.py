"""Handshakes of data connections: only the ranks of a ring pass them."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import pytest
from certificates import OTHER_TOKEN, TOKEN
from sockets import data_sockets, run

from hostopt.cluster.cluster import Cluster
from hostopt.options import Options
from hostopt.transport.security import Identity, Security
from hostopt.transport.tcp import data_server
from hostopt.transport.tcp.data_server import HandshakeError
from hostopt.transport.tcp.data_socket import DataSocket

CALLER, CALLED = Identity(1, "a1b2"), Identity(0, "c3d4")
ADDRESSES = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}


def security_of(token: str | None) -> Security:
    environ = {} if token is None else {"HOSTOPT_TOKEN": token}
    return Security(Cluster.from_dict(ADDRESSES, "worker", 0), Options(), environ)


async def identify(connection: DataSocket, token: str | None, **known: str) -> tuple[int, int]:
    incarnations = {CALLER.rank: CALLER.incarnation, **{int(k[1:]): v for k, v in known.items()}}
    peer = await data_server.identify(connection, CALLED, incarnations.get, security_of(token))
    await data_server.accept(connection)
    return peer


async def both(
    caller_token: str | None,
    called_token: str | None,
    caller: Identity = CALLER,
    called: Identity = CALLED,
    stream: int = 0,
) -> list[Any]:
    """Returns the results of the caller and of the called rank, or their errors."""
    client, server = data_sockets()

    async def end_after(coroutine: Any, connection: DataSocket) -> Any:
        try:
            return await coroutine
        except OSError as error:
            connection.close()  # as the data server and the stream do
            return error

    calling = data_server.introduce(client, caller, called, security_of(caller_token), stream)
    return await asyncio.gather(
        end_after(calling, client), end_after(identify(server, called_token), server)
    )


@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_rank_of_the_ring_is_identified(token: str | None) -> None:
    assert run(both(token, token)) == [None, (CALLER.rank, 0)]
    assert run(both(token, token, stream=7)) == [None, (CALLER.rank, 7)]


def test_the_number_of_the_stream_is_proved() -> None:
    async def call() -> None:
        client, server = data_sockets()
        write = client.write

        async def write_changed(parts: Any) -> None:
            client.write = write  # type: ignore[method-assign]
            fields = data_server._GREETING.unpack(*parts)
            await write([data_server._GREETING.pack(*fields[:3], 5, *fields[4:])])

        client.write = write_changed  # type: ignore[method-assign, assignment]
        calling = data_server.introduce(client, CALLER, CALLED, security_of(TOKEN))
        with pytest.raises(HandshakeError, match="token"):
            await asyncio.gather(calling, identify(server, TOKEN))

    run(call())


@pytest.mark.parametrize(
    ("caller", "called"),
    [
        (Identity(1, "ffff"), CALLED),  # another incarnation of the caller
        (CALLER, Identity(0, "ffff")),  # meant for another incarnation of the called rank
        (Identity(2, "a1b2"), CALLED),  # a rank that is not connected
    ],
)
@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_rank_of_another_ring_is_refused(
    token: str | None, caller: Identity, called: Identity
) -> None:
    at_caller, at_called = run(both(token, token, caller, called))
    assert isinstance(at_caller, OSError)
    assert isinstance(at_called, HandshakeError)
    assert "another ring" in str(at_called)


@pytest.mark.parametrize(
    ("caller_token", "called_token"),
    [(TOKEN, OTHER_TOKEN), (TOKEN, None), (None, TOKEN)],
)
def test_ranks_with_different_tokens_refuse_each_other(
    caller_token: str | None, called_token: str | None
) -> None:
    for error in run(both(caller_token, called_token)):
        assert isinstance(error, OSError)


def test_a_recorded_handshake_is_useless() -> None:
    async def record() -> bytes:
        """Returns what a true caller writes."""
        client, server = data_sockets()
        written, write = bytearray(), client.write

        async def write_and_record(parts: Any) -> None:
            written.extend(b"".join(parts))
            await write(parts)

        client.write = write_and_record  # type: ignore[method-assign, assignment]
        calling = data_server.introduce(client, CALLER, CALLED, security_of(TOKEN))
        await asyncio.gather(calling, identify(server, TOKEN))
        return bytes(written)

    async def replay() -> None:
        recorded = await record()
        client, server = data_sockets()
        await client.write([recorded])
        with pytest.raises(HandshakeError, match="another token"):
            await identify(server, TOKEN)

    run(replay())


def test_a_proof_cannot_be_reflected() -> None:
    """The proof of the called rank, sent back, is not the proof of the caller."""

    async def reflect() -> None:
        client, server = data_sockets()
        identifying = asyncio.ensure_future(identify(server, TOKEN))
        greeting = data_server._GREETING.pack(
            b"HOD", data_server.WIRE_VERSION, 1, 0, 0xA1B2, 0xC3D4, secrets.token_bytes(16)
        )
        await client.write([greeting])
        answer = await client.read_exactly(80)
        await client.write([answer[16:]])
        with pytest.raises(HandshakeError, match="another token"):
            await identifying

    run(reflect())


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n" * 9, bytes(100), bytes(range(100))])
def test_another_program_is_refused(data: bytes) -> None:
    async def call() -> None:
        client, server = data_sockets()
        await client.write([data])
        with pytest.raises(HandshakeError, match="another program"):
            await identify(server, TOKEN)

    run(call())
