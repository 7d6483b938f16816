"""Data sockets: bytes arrive unchanged, waits end, and TLS protects the connection."""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import time

import pytest
from certificates import Certificates
from sockets import connected_pair, data_sockets, run

from hostopt.transport.security import Tls
from hostopt.transport.tcp.data_socket import DataSocket, StalledError

LARGE = 20_000_000  # more than the buffers of the kernel hold


@pytest.mark.parametrize("sizes", [(1,), (0, 5), (64, 0), (64, LARGE), (64, 1000, LARGE)])
def test_bytes_arrive_unchanged(sizes: tuple[int, ...]) -> None:
    parts = [secrets.token_bytes(size) for size in sizes]

    async def transfer() -> bytes:
        sender, receiver = data_sockets()
        reading = asyncio.ensure_future(receiver.read_exactly(sum(sizes)))
        await sender.write(parts)
        return await reading

    assert run(transfer()) == b"".join(parts)


def test_both_directions_at_the_same_time() -> None:
    data = [secrets.token_bytes(LARGE) for _ in range(2)]

    async def exchange() -> list[bytes]:
        ends = data_sockets()
        reading = [asyncio.ensure_future(end.read_exactly(LARGE)) for end in ends]
        await asyncio.gather(*(end.write([each]) for end, each in zip(ends, data)))
        return [await each for each in reading]

    assert run(exchange()) == data[::-1]


def test_a_peer_that_takes_nothing_ends_a_write_at_the_deadline() -> None:
    async def write() -> None:
        sender, _receiver = data_sockets()
        await sender.write_rest([memoryview(bytes(LARGE))], timeout_s=0.05)

    with pytest.raises(StalledError):
        run(write())


def test_a_peer_that_takes_little_at_a_time_has_the_deadline_for_each_part() -> None:
    async def work() -> bool:
        sender, receiver = data_sockets()
        payload = memoryview(bytes(10 * LARGE))
        writing = asyncio.ensure_future(sender.write_rest([payload], timeout_s=0.5))
        begin_s = time.monotonic()
        while time.monotonic() < begin_s + 1.0:
            await receiver.read_exactly(LARGE // 20)
            await asyncio.sleep(0.01)
        assert not writing.done()
        writing.cancel()
        await asyncio.wait({writing})
        return writing.cancelled()

    assert run(work())


def test_more_parts_than_a_system_call_takes() -> None:
    parts = [bytes([number % 251]) * (number % 7) for number in range(3000)]

    async def transfer() -> bytes:
        sender, receiver = data_sockets()
        await sender.write(parts)
        return await receiver.read_exactly(sum(map(len, parts)))

    assert run(transfer()) == b"".join(parts)


@pytest.mark.parametrize("closing", ["this", "other"])
def test_the_end_of_the_connection_ends_a_read(closing: str) -> None:
    async def read() -> None:
        reader, other = data_sockets()
        reading = asyncio.ensure_future(reader.read_exactly(10))
        await other.write([b"four"])
        await asyncio.sleep(0)
        (reader if closing == "this" else other).close()
        await reading

    with pytest.raises(OSError, match="closed"):
        run(read())


def test_closing_ends_a_write_and_may_be_repeated() -> None:
    async def write() -> None:
        sender, _receiver = data_sockets()
        writing = asyncio.ensure_future(sender.write([bytes(LARGE)]))
        await asyncio.sleep(0)
        sender.close()
        sender.close()
        await writing

    with pytest.raises(OSError, match="closed by this rank"):
        run(write())


def test_a_closed_socket_neither_reads_nor_writes() -> None:
    async def use() -> None:
        sender, receiver = data_sockets()
        sender.close()
        receiver.close()
        with pytest.raises(OSError):
            await sender.write([b"x"])
        with pytest.raises(OSError):
            await receiver.read_exactly(1)

    run(use())


# --- TLS --------------------------------------------------------------------------------------


async def tls_pair(
    server: ssl.SSLContext, client: ssl.SSLContext, host: str
) -> tuple[DataSocket, DataSocket]:
    ends = data_sockets()
    await asyncio.gather(ends[0].start_tls(client, host), ends[1].start_tls(server))
    return ends


def test_tls_carries_bytes_in_both_directions(certificates: Certificates) -> None:
    tls = Tls(certificates["good"])
    data = [secrets.token_bytes(LARGE // 10) for _ in range(2)]

    async def exchange() -> list[bytes]:
        ends = await tls_pair(tls.server_context(), tls.client_context("127.0.0.1"), "127.0.0.1")
        reading = [asyncio.ensure_future(end.read_exactly(len(data[0]))) for end in ends]
        await asyncio.gather(*(end.write([each[:64], each[64:]]) for end, each in zip(ends, data)))
        return [await each for each in reading]

    assert run(exchange()) == data[::-1]


def test_tls_hides_the_bytes(certificates: Certificates) -> None:
    tls, secret = Tls(certificates["good"]), secrets.token_bytes(1000)

    async def eavesdrop() -> bytes:
        left, proxy_left = connected_pair()
        proxy_right, right = connected_pair()
        seen = bytearray()

        async def forward(source: socket.socket, target: socket.socket) -> None:
            while data := await loop.sock_recv(source, 1 << 16):
                seen.extend(data)
                await loop.sock_sendall(target, data)

        loop = asyncio.get_running_loop()
        middle = proxy_left, proxy_right
        for end in middle:
            end.setblocking(False)
        tasks = [
            asyncio.ensure_future(forward(*middle)),
            asyncio.ensure_future(forward(*middle[::-1])),
        ]
        client, server = DataSocket(left), DataSocket(right)
        await asyncio.gather(
            client.start_tls(tls.client_context("127.0.0.1"), "127.0.0.1"),
            server.start_tls(tls.server_context()),
        )
        await client.write([secret])
        assert await server.read_exactly(len(secret)) == secret
        for task in tasks:
            task.cancel()
        return bytes(seen)

    seen = run(eavesdrop())
    assert len(seen) > len(secret)
    assert secret[:32] not in seen


def test_a_connection_that_moves_to_another_loop_wakes_for_the_last_byte() -> None:
    """The kernel still has the low-water mark of the last wait before."""

    async def work() -> None:
        sender, receiver = data_sockets()
        reading = asyncio.ensure_future(receiver.read_exactly(64))
        await asyncio.sleep(0)  # it waits for 64 bytes
        await sender.write([bytes(64)])
        await reading
        moved = receiver.on_this_loop()
        await sender.write([bytes(63)])
        reading = asyncio.ensure_future(moved.read_exactly(64))
        while not moved._waits:
            await asyncio.sleep(0)  # all but one byte have arrived
        await sender.write([bytes(1)])
        await asyncio.wait_for(reading, 30)
        with pytest.raises(OSError, match="closed by this rank"):
            await receiver.read_exactly(1)

    run(work())
