"""All that a stranger can say to a rank, by structure: each note and frame is read or refused.

FUZZ_EXAMPLES says how many of each, 10,000 by default.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import zlib
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest
from conftest import FUZZ_EXAMPLES, NewRing, jobs_of
from fault_ring import FaultRing, assert_exact
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structures import texts_like

from hostopt.cluster import Cluster
from hostopt.errors import ConfigError, HostOptError, ProtocolError, error_to_dict
from hostopt.flight_recorder import FlightRecorder
from hostopt.options import Options
from hostopt.transport import mismatch
from hostopt.transport.base import Tag
from hostopt.transport.frame import HEADER_BYTES, FrameReader, Origin
from hostopt.transport.meeting import Meeting
from hostopt.transport.notes import read_leave, read_question, read_status
from hostopt.transport.stall import Culprit, find_culprit

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

MOST_BYTES = 1 << 16
CLUSTER = Cluster.from_dict(jobs_of([f"127.0.0.1:{port}" for port in (1, 2, 3)]), "chief", 0)
ERROR = {"kind": "PeerLostError", "message": "gone", "facts": {"rank": 1, "task": "worker:0"}}
TAG = [0, 5, 0, 1, 2, 3, 77]
NOTES: dict[str, dict[str, Any]] = {
    "Hello": {**Meeting(CLUSTER, Options()).hello(to=1), "rank": 1, "incarnation": "77"},
    "Status": {"waiting": 1, "tag": TAG},
    "Leave": {"sender": 1, "from": "77", "to": "9", "error": ERROR},
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
more = settings(max_examples=FUZZ_EXAMPLES, suppress_health_check=list(HealthCheck))


def assert_can_be_shown(error: HostOptError) -> None:
    json.dumps(error_to_dict(error))
    str(error).encode()
    str(error.root_cause).encode()


# --- what is read -----------------------------------------------------------------------------


@more
@given(texts_like(NOTES["Hello"]))
def test_a_hello_is_read_or_refused(data: bytes) -> None:
    meeting = Meeting(CLUSTER, Options())
    with contextlib.suppress(ValueError):
        hello = meeting.read_hello(data)
        meeting.is_another_life(hello["rank"], hello["incarnation"])
        meeting.incarnations[hello["rank"]] = hello["incarnation"]
        assert 0 <= meeting.origin(hello["rank"]).incarnation < 1 << 64
        json.dumps(meeting.hello(to=hello["rank"]))
        try:
            meeting.check(hello["rank"], hello)
        except ConfigError as error:
            assert_can_be_shown(error)
            assert len(str(error)) < 10_000


@more
@given(texts_like(NOTES["Status"]))
def test_a_question_is_read_or_refused(data: bytes) -> None:
    recorder = FlightRecorder(0, None)
    recorder.note("sent", 1, "bucket", Tag(*TAG))
    with contextlib.suppress(ValueError):
        question = read_question(data, MOST_BYTES)
        assert recorder.has_sent(question["waiting"], question["tag"]) in (True, False)
        assert {}.get(question["tag"][0]) is None


@more
@given(texts_like(STATUS))
def test_a_status_is_read_or_refused(data: bytes) -> None:
    async def ask(peer: int, waiting: int, tag: Any) -> dict[str, Any] | None:
        try:
            return read_status(data, MOST_BYTES, CLUSTER.size, asked=True)
        except ValueError:
            return None

    own_call = {**STATUS["call"], "checksum": 1}
    transport: Any = SimpleNamespace(
        cluster=CLUSTER, rank=0, size=3, ask=ask, call_on=lambda channel: own_call
    )
    mismatch._AGAIN_AFTER_S = 0
    try:
        culprit = asyncio.run(find_culprit(transport, 1, TAG))
        assert isinstance(culprit, Culprit)
        culprit.text.encode()
    except HostOptError as error:
        assert_can_be_shown(error)
    assert_can_be_shown(asyncio.run(mismatch.find_mismatch(transport, 1, TAG)))


@more
@given(texts_like(NOTES["Leave"]))
def test_a_goodbye_is_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        note, error = read_leave(data, MOST_BYTES)
        assert isinstance(note["sender"], int)
        if error is not None:
            error.resume_from(None)
            assert_can_be_shown(error)


FRAME = struct.Struct("<2sBBIQIIIIIQIQI")
GOOD = (b"HO", 4, 1, *TAG, 5, 8, 9, 0)
CHANGES = st.tuples(st.integers(1, 13), st.sampled_from([0, 1, 3, 5, 8, 9, 255]))


@more
@given(
    st.lists(CHANGES, max_size=2).map(dict),
    st.binary(max_size=9) | st.just(b"flour"),
    st.booleans(),
)
def test_a_frame_with_a_right_checksum_is_read_or_refused(
    changes: dict[int, int], payload: bytes, whole: bool
) -> None:
    fields = [changes.get(place, value) for place, value in enumerate(GOOD)]
    begin = FRAME.pack(*fields)
    crc = zlib.crc32(begin + payload if whole else begin)
    reader = FrameReader(Origin(8, 9))
    with contextlib.suppress(ProtocolError):
        found = reader.read(begin + struct.pack("<I", crc) + payload)
        assert len(begin) + 4 == HEADER_BYTES
        assert (fields[1], *fields[10:13]) == (4, len(payload), 8, 9)
        assert found is None or found == (Tag(*fields[3:10]), payload)


# --- what a ring that lives makes of it -------------------------------------------------------

BATCH = 100
RANK = (("rank", "1"),)  # a connection without would be ended as a stranger's
REFUSED = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}


@pytest.mark.parametrize("method", NOTES)
def test_a_ring_lives_whatever_it_is_told(processes: NewRing, method: str) -> None:
    ring = processes(2)
    started = FaultRing(ring).start_all("--steps", 20, "--ask-after", 10)
    for process in started:
        process.expect("go on?")
    memory = psutil.Process(started[0].process.pid)
    with grpc.insecure_channel(ring.addresses[0], [("grpc.enable_http_proxy", 0)]) as channel:
        call, codes, sizes = channel.unary_unary(f"/hostopt.Ring/{method}"), set(), []

        @settings(more, max_examples=max(FUZZ_EXAMPLES // BATCH, 1))
        @given(st.lists(texts_like(NOTES[method]), min_size=BATCH, max_size=BATCH))
        def tell(notes: list[bytes]) -> None:
            calls = [call.future(note, metadata=RANK, timeout=60) for note in notes]
            codes.update(each.code() for each in calls)
            sizes.append(memory.memory_info().rss)

        tell()
    for process in started:
        process.tell("go on")
    for process in started:
        assert_exact(process, steps=20)
        assert not process.stderr
    assert codes <= REFUSED
    print(method, [size >> 20 for size in sizes[:: max(len(sizes) // 10, 1)]])
    assert sizes[-1] - sizes[len(sizes) // 4] < 10 << 20
