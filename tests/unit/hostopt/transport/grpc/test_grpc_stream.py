"""A stream in gRPC messages is open once the peer has accepted it, and not before."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from hostopt.cluster.cluster import Cluster
from hostopt.options import Options
from hostopt.transport import event_loop
from hostopt.transport.frame import FrameWriter, Origin
from hostopt.transport.grpc import data_streams
from hostopt.transport.grpc.client import RpcClient
from hostopt.transport.grpc.data_streams import ACCEPTED, END_OF_STREAM, GrpcStream
from hostopt.transport.grpc.ring import DEFAULT, Peers, Ring
from hostopt.transport.grpc.runtime import grpc
from hostopt.transport.security import Security


def new_server(answer: Any) -> grpc.aio.Server:
    """Returns a server whose method Stream is `answer`."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    handler = grpc.stream_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("ring", {"Stream": handler})]
    )
    return server


@pytest.mark.parametrize(
    ("initial_metadata", "is_open"), [((ACCEPTED,), True), ((), False), ((("a", "b"),), False)]
)
def test_a_stream_is_open_when_its_initial_metadata_says_so(
    initial_metadata: tuple[tuple[str, str], ...], is_open: bool
) -> None:
    """The metadata of a refused stream may arrive before the refusal."""

    async def work() -> bool:
        refuse = asyncio.Event()

        async def answer(_: object, context: grpc.aio.ServicerContext) -> bytes:
            await context.send_initial_metadata(initial_metadata)
            await refuse.wait()
            await context.abort(grpc.StatusCode.NOT_FOUND, "another ring")
            raise AssertionError

        async def on_broken(reason: str) -> None:
            broken.append(reason)

        broken: list[str] = []
        server = new_server(answer)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        call = channel.stream_unary("/ring/Stream")()
        stream = GrpcStream(channel, call, FrameWriter(Origin(1, 2), True), 30.0, on_broken)
        is_open = await stream.wait_until_open(30.0)
        refuse.set()
        await stream.flush()
        assert stream.ended
        assert len(broken) == 1
        assert not await stream.wait_until_open(30.0)
        await stream.close()
        await server.stop(None)
        return is_open

    assert event_loop.run(work()) == is_open


def test_a_stream_that_is_not_accepted_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_streams, "_ACCEPTED_WITHIN_S", 0.5)

    async def on_broken(reason: str) -> None:
        broken.append(reason)

    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never answers
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{silent.getsockname()[1]}")
            call = channel.stream_unary("/ring/Stream")(wait_for_ready=True)
            stream = GrpcStream(channel, call, FrameWriter(Origin(1, 2), True), 30.0, on_broken)
            assert not await stream.wait_until_open(30.0)
            assert stream.ended
            await stream.close()

    broken: list[str] = []
    event_loop.run(work())
    assert broken == ["it has not accepted a stream for 0.5 s"]


def test_a_stream_survives_a_first_attempt_to_connect_that_fails() -> None:
    """On a busy machine an attempt may take longer than gRPC waits for it."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    jobs = {"worker": [f"127.0.0.1:{port}", "127.0.0.1:1"]}
    cluster = Cluster.from_dict(jobs, "worker", 1)
    options = Options()
    nothing: Any = None
    security = Security(cluster, options, {})
    ring = Ring(Peers(cluster), options, security, DEFAULT, mailbox=nothing, abort=nothing)
    client = RpcClient(ring, "ring")

    async def answer(_: object, context: grpc.aio.ServicerContext) -> bytes:
        await context.send_initial_metadata((ACCEPTED,))
        assert await context.read() == END_OF_STREAM
        return b""

    async def on_broken(reason: str) -> None:
        raise AssertionError(reason)

    async def work() -> None:
        channel, call = client.open_stream(0)
        stream = GrpcStream(channel, call, FrameWriter(Origin(1, 2), True), 30.0, on_broken)
        connection, _ = await asyncio.get_running_loop().run_in_executor(None, listener.accept)
        connection.close()
        listener.close()
        server = new_server(answer)
        assert server.add_insecure_port(f"127.0.0.1:{port}") == port
        await server.start()
        assert await stream.wait_until_open(30.0)
        await stream.flush()
        assert stream.ended
        await stream.close()
        await server.stop(None)

    event_loop.run(work())
