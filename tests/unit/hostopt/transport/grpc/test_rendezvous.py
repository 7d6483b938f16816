"""Hello messages: their fields, and the errors that name differences."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest
from harness import ROOT, jobs_of

from hostopt import versions
from hostopt.cluster.cluster import Cluster
from hostopt.errors import ConfigError
from hostopt.options import Options
from hostopt.transport.grpc.rendezvous import HelloMessages
from hostopt.transport.grpc.ring import Peers

ADDRESSES = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]
TASKS = ["chief:0, 127.0.0.1:1", "worker:0, 127.0.0.1:2", "worker:1, 127.0.0.1:3"]
NAMES = [f"rank {rank} ({task})" for rank, task in enumerate(TASKS)]


def messages_of(rank: int, addresses: list[str] = ADDRESSES, **options: Any) -> HelloMessages:
    task = ("chief", 0) if rank == 0 else ("worker", rank - 1)
    peers = Peers(Cluster.from_dict(jobs_of(addresses), *task))
    return HelloMessages(peers, Options(**options))


def refusal(local: HelloMessages, peer: int, **changes: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        local.check(peer, {**messages_of(peer).build(to=local._peers.rank), **changes})
    return caught.value


def test_hello_has_the_documented_fields() -> None:
    row = re.search(r"^\| `Hello` \|.*", (ROOT / "docs/wire.md").read_text(), re.MULTILINE)
    assert row is not None
    documented = json.loads(re.search(r"`(\{.*?\})`", row[0])[1].replace("…", ""))
    assert documented.keys() == messages_of(1).build().keys()
    assert documented["version"] == messages_of(1).build()["version"]


def test_equal_ranks_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    messages_of(0).check(2, messages_of(2).build())
    messages_of(2).check(0, messages_of(0).build(to=2))
    assert not caplog.records


def test_only_the_hostopt_version_is_named_if_it_differs() -> None:
    remote = {"hostopt": "0.2.0", "version": 9, "colour": "red"}
    error = refusal(messages_of(2), 0, **remote)
    assert str(error) == (
        f"{NAMES[0]} has hostopt 0.2.0, {NAMES[2]} has hostopt {versions.VERSION}. Install the "
        "same version of hostopt on all ranks"
    )
    assert error.rank == 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"compression": "bf16"}, f"{NAMES[1]} has compression 'bf16'"),
        ({"autotune": True}, f"{NAMES[1]} has autotune True"),
        ({"segment_bytes": 7}, f"{NAMES[1]} has segment_bytes 7"),
        ({"version": 9}, f"{NAMES[1]} has wire version 9"),
        (
            {"colour": [1]},
            f"{NAMES[0]} has 'colour' nothing, {NAMES[1]} has 'colour' [1]",
        ),
        ({"rank": 2}, f"at the address of {NAMES[1]} rank 2 answers"),
        ({"ring": "h0"}, f"{NAMES[1]} has ring 'h0'. "),
        (
            {"ring": ["chief:0, 127.0.0.1:1", 7]},
            "rank 1 (worker:0, 127.0.0.1:2) has as task 1 of its ring 7. ",
        ),
        ({"nonfinite": "x" * 9999}, f"has nonfinite 'x{'x' * 198}. Give all ranks the same op"),
    ],
)
def test_only_differences_are_named(changes: dict[str, Any], text: str) -> None:
    error = refusal(messages_of(0), 1, **changes)
    assert text in str(error)
    assert "communication" not in str(error)
    assert len(str(error)) < 700


def test_a_longer_ring_is_named() -> None:
    error = refusal(messages_of(0), 1, ring=messages_of(1, ADDRESSES[:2]).build()["ring"])
    assert str(error) == (
        f"{NAMES[0]} has as task 2 of its ring {TASKS[2]!r}, {NAMES[1]} has as task 2 of its ring "
        'nothing. Give all ranks the same "cluster" in TF_CONFIG'
    )


def test_both_ranks_report_the_same_text() -> None:
    texts = set()
    for local, peer in ((0, 1), (1, 0)):
        options = [{"compression": "fp16"}, {"nonfinite": "skip"}]
        with pytest.raises(ConfigError) as caught:
            messages_of(local, **options[local]).check(
                peer, messages_of(peer, **options[peer]).build()
            )
        texts.add(str(caught.value))
    assert len(texts) == 1, texts


@pytest.mark.parametrize(("name", "shown"), [("python", "Python"), ("tensorflow", "TensorFlow")])
def test_versions_that_may_differ_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, shown: str
) -> None:
    installed = {**versions.local_versions(), "tensorflow": "2.21.0", "python": "3.11"}
    monkeypatch.setattr("hostopt.transport.grpc.rendezvous.local_versions", lambda: installed)
    messages = messages_of(0)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            messages.check(1, {**messages.build(), "rank": 1, name: "2.15.1"})
            messages.check(2, {**messages.build(), "rank": 2, name: None})
    (record,) = caplog.records
    assert (
        f"{NAMES[0]} has {shown} {installed[name]}, {NAMES[1]} has {shown} 2.15.1. "
        in record.message
    )
