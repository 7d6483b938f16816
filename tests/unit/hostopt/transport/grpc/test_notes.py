"""JSON messages: their documented fields, and how malformed ones are refused."""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import ROOT
from rings import Spawn

from hostopt.cluster.cluster import Cluster
from hostopt.collectives.communicator import Communicator
from hostopt.errors import PeerLostError, error_to_dict
from hostopt.transport.grpc import notes
from hostopt.transport.grpc import ring as grpc_ring
from hostopt.transport.grpc.limits import DETAILS_BYTES
from hostopt.transport.grpc.liveness import Departure
from hostopt.transport.grpc.ring import Peers, Ring
from hostopt.transport.message import Tag
from hostopt.transport.overview import details_of

DOCUMENTATION = (ROOT / "docs/wire.md").read_text()
MOST_BYTES = 1 << 16
CLUSTER = Cluster.from_dict({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "worker", 0)


def row_of(method: str) -> str:
    row = re.search(rf"^\| `{method}` \|.*", DOCUMENTATION, re.MULTILINE)
    assert row is not None
    return row[0]


def documented_status() -> dict[str, Any]:
    block = re.search(r"^```json\n(.*?)^```", DOCUMENTATION, re.MULTILINE | re.DOTALL)
    assert block is not None
    return dict(json.loads(block[1]))


def shape_of(value: Any) -> Any:
    """The keys of a value at every depth."""
    if isinstance(value, dict):
        return {key: shape_of(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [shape_of(each) for each in value[:1]]
    return None


# --- documented fields ------------------------------------------------------------------------


def test_the_documented_status_request_has_the_fields_of_the_code() -> None:
    examples = re.findall(r"`(\{.*?\})`", row_of("Status"))
    assert [json.loads(example.replace("…", "")).keys() for example in examples] == [
        {}.keys(),
        notes.STATUS_REQUEST.keys(),
    ]


def test_the_documented_status_can_be_read() -> None:
    status = documented_status()
    assert status.keys() == notes.STATUS_FOR_MESSAGE.keys()
    data = json.dumps(status).encode()
    assert notes.read_status(data, MOST_BYTES, CLUSTER.size, for_message=True) == status


def test_a_status_has_the_documented_fields(spawn_inproc: Spawn) -> None:
    def work(communicator: Communicator) -> dict[str, Any] | None:
        communicator.all_reduce(np.ones(3))
        if communicator.rank == 1:
            return None
        transport = communicator.transport
        transport.blocked_sends = lambda: {1: 0.0}  # type: ignore[method-assign]
        with transport.mailbox.waiting(1, Tag(0, 57), "bucket 2"):
            status = transport.status_for(1, Tag(communicator.channel, 57))
        return {"incarnation": "9f", **json.loads(json.dumps(status))}

    status, _ = spawn_inproc(2, work)
    assert status is not None
    assert shape_of(status) == shape_of(documented_status())


def test_an_overview_has_the_documented_fields(spawn_inproc: Spawn) -> None:
    blocks = re.findall(r"^```json\n(.*?)^```", DOCUMENTATION, re.MULTILINE | re.DOTALL)
    documented = json.loads(blocks[1])
    assert notes.read_overview(json.dumps(documented).encode(), MOST_BYTES) == documented

    def work(communicator: Communicator) -> Any:
        communicator.all_reduce(np.ones(3))
        if communicator.rank == 1:
            return None
        with communicator.transport.mailbox.waiting(1, Tag(0, 57), "bucket 2"):
            return details_of(communicator.transport, [])

    details, _ = spawn_inproc(2, work)
    assert shape_of(details) == shape_of(documented["ranks"][0])
    assert notes.read_details(json.dumps(details).encode(), 2) == details


def test_details_are_short(spawn_inproc: Spawn) -> None:
    name = "\N{SNOWMAN}" * 9999

    def work(communicator: Communicator) -> Any:
        communicator.transport.recorder.record("sent", 1, name, Tag(0, 57))
        with communicator.transport.mailbox.waiting(1, Tag(0, 57), name):
            details = details_of(communicator.transport, range(9999))
        communicator.transport.mailbox.fail(PeerLostError(name))
        return {**details, "error": details_of(communicator.transport, [])["error"]}

    (details,) = spawn_inproc(1, work)
    data = json.dumps(details).encode()
    assert len(data) <= DETAILS_BYTES
    assert notes.read_details(data, 9999) == details


@pytest.mark.parametrize("error", [None, PeerLostError("gone", rank=1)])
def test_a_leave_message_has_the_documented_fields(error: PeerLostError | None) -> None:
    sent = []

    async def call(peer: int, method: str, data: bytes, timeout_s: float, **_: bool) -> bytes:
        sent.append(data)
        return b""

    client: Any = SimpleNamespace(channels={1: None}, call=call)
    nothing: Any = None
    timing = grpc_ring.DEFAULT
    ring = Ring(Peers(CLUSTER), nothing, nothing, timing, mailbox=nothing, abort=nothing)
    departure = Departure(ring, client, nothing)
    note = error and error_to_dict(error)
    asyncio.run(departure._send(1, note))
    message, received = notes.read_leave(sent[0], MOST_BYTES)
    documented = re.findall(r'"(\w+)"', row_of("Leave"))
    names = [*message, *message.get("error", ())]
    assert names == documented[: len(names)]
    assert str(received) == str(error)


def test_the_documented_attributes_equal_those_of_an_error() -> None:
    sentence = re.search(r'The "facts" of an error are (.*?);', DOCUMENTATION, re.DOTALL)
    assert sentence is not None
    names = re.split(r", |\s+and ", " ".join(sentence[1].split()))
    assert names == list(error_to_dict(PeerLostError("gone"))["facts"])


# --- malformed messages -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "Expecting value"),
        (b"[]", "not a JSON object"),
        (b'{"x": "' + b"x" * 100 + b'"}', "a message of 109 bytes, expected at most 100"),
        (b'{"x": ' + b"[" * 9 + b"]" * 9 + b"}", "nested too deeply"),
        (b"\xff", "decode"),
    ],
)
def test_a_message_that_cannot_be_read(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        notes.read_note(data, 100, {})


def test_texts_of_a_message_can_be_encoded() -> None:
    note = notes.read_note(rb'{"x": "half a character \ud800"}', MOST_BYTES, {})
    assert note["x"].encode() == b"half a character ?"


@pytest.mark.parametrize(
    "change",
    [
        {"incarnation": 7},
        {"waits": [{"peer": 0}]},
        {"waits": [{"peer": 2, "what": "", "tag": [0] * 7, "for_s": 0.0}]},
        {"sends": [{"peer": -1, "for_s": 0.0}]},
        {"call": {}},
    ],
)
def test_a_malformed_status_is_refused(change: dict[str, Any]) -> None:
    data = json.dumps({**documented_status(), **change}).encode()
    with pytest.raises(ValueError, match=r"status|field"):
        notes.read_status(data, MOST_BYTES, CLUSTER.size, for_message=True)
