"""Generated messages and frames of strangers: each is read or refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import zlib
from typing import Any

import grpc
import psutil
import pytest
from fault_ring import FaultRing, assert_exact
from harness import jobs_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rings import NewRing
from sockets import data_sockets
from structures import FUZZ_EXAMPLES, texts_like

from hostopt.cluster.cluster import Cluster
from hostopt.commands.status import format_overview
from hostopt.errors import ConfigError, HostOptError, ProtocolError, error_to_dict
from hostopt.options import Options
from hostopt.telemetry.flight_recorder import FlightRecorder
from hostopt.transport import mismatch
from hostopt.transport.frame import HEADER_BYTES, FrameReader, Origin
from hostopt.transport.grpc.notes import (
    STATUS_REQUEST,
    read_details,
    read_leave,
    read_note,
    read_overview,
    read_status,
)
from hostopt.transport.grpc.rendezvous import HelloMessages
from hostopt.transport.grpc.ring import Peers
from hostopt.transport.mailbox import Mailbox
from hostopt.transport.message import Tag
from hostopt.transport.security import Identity, Security
from hostopt.transport.stall import Culprit, find_culprit
from hostopt.transport.tcp import data_server
from hostopt.transport.tcp.socket_stream import receive_frames

pytestmark = pytest.mark.timeout(1200)

MOST_BYTES = 1 << 16
CLUSTER = Cluster.from_dict(jobs_of([f"127.0.0.1:{port}" for port in (1, 2, 3)]), "chief", 0)
PAIR = Cluster.from_dict({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "worker", 0)
ERROR = {"kind": "PeerLostError", "message": "gone", "facts": {"rank": 1, "task": "worker:0"}}
TAG = [0, 5, 0, 1, 2, 3, 77]
NOTES: dict[str, dict[str, Any]] = {
    "Hello": {
        **HelloMessages(Peers(CLUSTER), Options()).build(to=1),
        "rank": 1,
        "incarnation": "77",
    },
    "Status": {"waiting": 1, "tag": TAG},
    "Leave": {"sender": 1, "from": "77", "to": "9", "error": ERROR},
    "Details": {"request": "is not read"},
    "Observe": {"request": "is not read"},
}
STATUS = {
    "incarnation": "77",
    "error": None,
    "waits": [{"peer": 2, "what": "bucket", "tag": TAG, "for_s": 1.5}],
    "sends": [{"peer": 0, "for_s": 0.5}],
    "last": {"what": "bucket", "step": 5, "ago_s": 2.0},
    "sent": False,
    "call": {"step": 5, "bucket": 0, "signature": "all_reduce(sum)", "checksum": 77},
}
DETAILS = {
    "step": 7,
    "memory_bytes": 1 << 20,
    "versions": {"hostopt": "0.1.0", "python": "3.11", "tensorflow": None},
    "missing": [1],
    "wait": {"peer": 2, "what": "bucket", "for_s": 1.5},
    "send": {"peer": 0, "for_s": 0.5},
    "last": {"what": "bucket", "step": 5, "ago_s": 2.0},
    "error": None,
}
TASKS = [{"task": task.name, "address": task.address} for task in CLUSTER.ring]
OVERVIEW = {"ring": TASKS, "ranks": [DETAILS, {**DETAILS, "error": "lost"}, "no answer for 2 s"]}
more = settings(max_examples=FUZZ_EXAMPLES, suppress_health_check=list(HealthCheck))


def assert_can_be_shown(error: HostOptError) -> None:
    json.dumps(error_to_dict(error))
    str(error).encode()
    str(error.root_cause).encode()


# --- readers ----------------------------------------------------------------------------------


@more
@given(texts_like(NOTES["Hello"]))
def test_hello_is_read_or_refused(data: bytes) -> None:
    peers = Peers(CLUSTER)
    messages = HelloMessages(peers, Options())
    with contextlib.suppress(ValueError):
        hello = messages.read(data)
        peers.is_restarted(hello["rank"], hello["incarnation"])
        peers.incarnations[hello["rank"]] = hello["incarnation"]
        assert 0 <= peers.origin(hello["rank"]).incarnation < 1 << 64
        json.dumps(messages.build(to=hello["rank"]))
        try:
            messages.check(hello["rank"], hello)
        except ConfigError as error:
            assert_can_be_shown(error)
            assert len(str(error)) < 10_000


@more
@given(texts_like(NOTES["Status"]))
def test_status_request_is_read_or_refused(data: bytes) -> None:
    recorder = FlightRecorder(0, None)
    recorder.record("sent", 1, "bucket", Tag(*TAG))
    with contextlib.suppress(ValueError):
        question = read_note(data, MOST_BYTES, STATUS_REQUEST)
        assert recorder.has_sent(question["waiting"], question["tag"]) in (True, False)
        assert {}.get(question["tag"][0]) is None


@more
@given(texts_like(STATUS))
def test_status_is_read_or_refused(data: bytes) -> None:
    async def request_status(peer: int, waiting: int, tag: Any) -> dict[str, Any] | None:
        try:
            return read_status(data, MOST_BYTES, CLUSTER.size, for_message=True)
        except ValueError:
            return None

    mismatch._RETRY_AFTER_S = 0
    try:
        culprit = asyncio.run(find_culprit(CLUSTER, 1, TAG, request_status))
        assert isinstance(culprit, Culprit)
        culprit.text.encode()
    except HostOptError as error:
        assert_can_be_shown(error)
    result = mismatch.find_mismatch(CLUSTER, 1, TAG, request_status)
    assert_can_be_shown(asyncio.run(result))


@more
@given(texts_like(NOTES["Leave"]))
def test_leave_is_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        note, error = read_leave(data, MOST_BYTES)
        assert isinstance(note["sender"], int)
        if error is not None:
            error.resume_from(None)
            assert_can_be_shown(error)


@more
@given(texts_like(DETAILS))
def test_details_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        details = read_details(data, CLUSTER.size)
        json.dumps(details)
        assert format_overview({"ring": TASKS, "ranks": [details] * CLUSTER.size})


@more
@given(texts_like(OVERVIEW))
def test_an_overview_is_shown_or_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        overview = read_overview(data, MOST_BYTES)
        json.dumps(overview)
        shown = format_overview(overview)
        assert all(line.isprintable() for line in shown.split("\n"))
        shown.encode()


FRAME = struct.Struct("<2sBBIQIIIIIQIQI")
GOOD = (b"HO", 5, 1, *TAG, 5, 8, 9, 0)
CHANGES = st.tuples(st.integers(1, 13), st.sampled_from([0, 1, 3, 5, 8, 9, 255]))


@st.composite
def frames(draw: st.DrawFn) -> tuple[list[Any], bytes, bytes]:
    """Fields, header and payload of a frame, whose checksum is that of the header or of all."""
    changes = dict(draw(st.lists(CHANGES, max_size=2)))
    payload = draw(st.binary(max_size=9) | st.just(b"flour"))
    fields = [changes.get(place, value) for place, value in enumerate(GOOD)]
    begin = FRAME.pack(*fields)
    crc = zlib.crc32(begin + payload if draw(st.booleans()) else begin)
    return fields, begin + struct.pack("<I", crc), payload


@more
@given(frames())
def test_frame_with_correct_checksum_is_read_or_refused(
    frame: tuple[list[Any], bytes, bytes],
) -> None:
    fields, header, payload = frame
    reader = FrameReader(Origin(8, 9))
    with contextlib.suppress(ProtocolError):
        result = reader.read(header + payload)
        assert len(header) == HEADER_BYTES
        assert (fields[1], *fields[10:13]) == (5, len(payload), 8, 9)
        assert result is None or result == (Tag(*fields[3:10]), payload)


# --- data sockets -----------------------------------------------------------------------------

GREETING = struct.Struct("<3sBIBQQ16s")
GREETED = (b"HOD", 5, 1, 0, 9, 7, bytes(16))
GREETING_CHANGES = st.tuples(st.integers(1, 5), st.sampled_from([0, 1, 3, 5, 7, 9, 255]))


def security_of(token: str) -> Security:
    return Security(PAIR, Options(), {"HOSTOPT_TOKEN": token} if token else {})


@more
@given(
    st.lists(GREETING_CHANGES, max_size=2).map(dict),
    st.binary(max_size=99) | st.just(bytes(64)),
    st.sampled_from(["", "a token"]),
)
def test_a_greeting_is_accepted_or_refused(
    changes: dict[int, int], rest: bytes, token: str
) -> None:
    fields = [changes.get(place, value) for place, value in enumerate(GREETED)]

    async def greet() -> tuple[int, int]:
        caller, called = data_sockets()
        await caller.write([GREETING.pack(*fields), rest])
        caller._socket.shutdown(socket.SHUT_WR)
        try:
            return await data_server.identify(
                called, Identity(0, "7"), {1: "9"}.get, security_of(token)
            )
        finally:
            caller.close()
            called.close()

    with contextlib.suppress(OSError):
        assert asyncio.run(greet()) == (1, fields[3])
        assert (*fields[:3], 0, *fields[4:]) == GREETED
        assert (token, rest[:64]) == ("", bytes(64))


@more
@given(frames())
def test_a_frame_on_a_socket_touches_only_its_own_buffer(
    frame: tuple[list[Any], bytes, bytes],
) -> None:
    fields, header, payload = frame
    mailbox, into = Mailbox(PAIR, Options(), print, print), bytearray(5)

    async def receive() -> None:
        caller, called = data_sockets()
        taking = asyncio.ensure_future(mailbox.take(1, Tag(*TAG), "", memoryview(into)))
        await asyncio.sleep(0)
        await caller.write([header, payload])
        caller.close()
        try:
            await receive_frames(called, FrameReader(Origin(8, 9)), mailbox, 1, MOST_BYTES)
        finally:
            called.close()
            taking.cancel()
            await asyncio.wait({taking})

    with contextlib.suppress(ProtocolError, OSError):
        asyncio.run(receive())
    is_right = tuple(fields[3:]) == GOOD[3:]
    if any(into):
        assert is_right
        assert into.startswith(payload[:5])
    for (_, *numbers), (tag, stored) in mailbox._messages.items():
        assert (numbers, list(tag)) == (fields[3:9], fields[3:10])
        assert stored == payload[: fields[10]]


# --- a running ring ---------------------------------------------------------------------------

BATCH = 100
STRANGERS = "as no rank has called over them"
REFUSED = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}


def incarnation_at(address: str) -> str:
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        answer = channel.unary_unary("/hostopt.Ring/Status")(b"{}", timeout=60)
    return str(json.loads(answer)["incarnation"])


@pytest.mark.parametrize("method", NOTES)
def test_a_ring_survives_malformed_messages(processes: NewRing, method: str) -> None:
    ring = processes(2)
    started = FaultRing(ring).start_all("--steps", 20, "--ask-after", 10)
    for process in started:
        process.expect("continue?")
    memory = psutil.Process(started[0].process.pid)
    # the connection of a caller that does not claim to be a rank would be ended after a while
    metadata = (("rank", "1"), ("from", incarnation_at(ring.addresses[1])))
    with grpc.insecure_channel(ring.addresses[0], [("grpc.enable_http_proxy", 0)]) as channel:
        call, details, sizes = channel.unary_unary(f"/hostopt.Ring/{method}"), {}, []

        @settings(more, max_examples=max(FUZZ_EXAMPLES // BATCH, 1))
        @given(st.lists(texts_like(NOTES[method]), min_size=BATCH, max_size=BATCH))
        def tell(notes: list[bytes]) -> None:
            calls = [call.future(note, metadata=metadata, timeout=60) for note in notes]
            details.update({each.code(): each.details() for each in calls})
            sizes.append(memory.memory_info().rss)

        tell()
    for process in started:
        process.write_line("continue")
    for process in started:
        assert_exact(process, steps=20)
        # on a busy machine the callers of this test can take longer than strangers may
        warnings = [line for line in process.stderr.splitlines() if STRANGERS not in line]
        assert warnings == []
    assert details.keys() <= REFUSED, details
    print(method, [size >> 20 for size in sizes[:: max(len(sizes) // 10, 1)]])
    assert sizes[-1] - sizes[len(sizes) // 4] < 10 << 20
