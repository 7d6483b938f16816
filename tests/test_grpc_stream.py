"""A stream in gRPC messages is open once the peer has accepted it, and not before."""

from __future__ import annotations

import asyncio

import pytest

from hostopt.transport import event_loop
from hostopt.transport.frame import FrameWriter, Origin
from hostopt.transport.grpc.grpc_stream import ACCEPTED, GrpcStream
from hostopt.transport.grpc.runtime import grpc


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
        handler = grpc.stream_unary_rpc_method_handler(answer)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("ring", {"Stream": handler})]
        )
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
