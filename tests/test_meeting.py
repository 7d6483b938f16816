"""What ranks say of themselves when they meet, and what they say of a difference."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import NewRing, jobs_of

from hostopt import versions
from hostopt.cluster import Cluster
from hostopt.errors import ConfigError
from hostopt.options import Options
from hostopt.transport.meeting import Meeting

ROOT = Path(__file__).resolve().parents[1]
ADDRESSES = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]
TASKS = ["chief:0, 127.0.0.1:1", "worker:0, 127.0.0.1:2", "worker:1, 127.0.0.1:3"]
NAMES = [f"rank {rank} ({task})" for rank, task in enumerate(TASKS)]


def meeting(rank: int, addresses: list[str] = ADDRESSES, **options: Any) -> Meeting:
    task = ("chief", 0) if rank == 0 else ("worker", rank - 1)
    return Meeting(Cluster.from_dict(jobs_of(addresses), *task), Options(**options))


def refusal(own: Meeting, peer: int, **changes: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        own.check(peer, {**meeting(peer).hello(to=own.rank), **changes})
    return caught.value


def test_the_fields_of_a_hello_are_those_of_the_documentation() -> None:
    row = re.search(r"^\| `Hello` \|.*", (ROOT / "docs/wire.md").read_text(), re.MULTILINE)
    assert row is not None
    documented = json.loads(re.search(r"`(\{.*?\})`", row[0])[1].replace("…", ""))
    assert documented.keys() == meeting(1).hello().keys()
    assert documented["version"] == meeting(1).hello()["version"]


def test_the_version_is_that_of_the_package() -> None:
    found = re.search(r"^version = (.+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] == versions.VERSION


def test_ranks_of_one_kind_have_nothing_to_say(caplog: pytest.LogCaptureFixture) -> None:
    meeting(0).check(2, meeting(2).hello())
    meeting(2).check(0, meeting(0).hello(to=2))
    assert not caplog.records


def test_another_version_of_hostopt_is_all_that_is_named() -> None:
    theirs = {"hostopt": "0.2.0", "version": 9, "colour": "red"}
    error = refusal(meeting(2), 0, **theirs)
    assert str(error) == (
        f"{NAMES[0]} has hostopt 0.2.0, {NAMES[2]} has hostopt {versions.VERSION}. Install the "
        "same version of hostopt on all ranks"
    )
    assert error.rank == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"compression": "bf16"}, f"{NAMES[1]} has compression 'bf16'"),
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
def test_only_what_differs_is_named(changes: dict[str, Any], said: str) -> None:
    error = refusal(meeting(0), 1, **changes)
    assert said in str(error)
    assert "communication" not in str(error)
    assert len(str(error)) < 700


def test_a_ring_that_is_longer_is_named_where_it_is() -> None:
    error = refusal(meeting(0), 1, ring=meeting(1, ADDRESSES[:2]).hello()["ring"])
    assert str(error) == (
        f"{NAMES[0]} has as task 2 of its ring {TASKS[2]!r}, {NAMES[1]} has as task 2 of its ring "
        'nothing. Give all ranks the same "cluster" in TF_CONFIG'
    )


def test_both_ranks_say_the_same() -> None:
    texts = set()
    for own, peer in ((0, 1), (1, 0)):
        options = [{"compression": "fp16"}, {"nonfinite": "skip"}]
        with pytest.raises(ConfigError) as caught:
            meeting(own, **options[own]).check(peer, meeting(peer, **options[peer]).hello())
        texts.add(str(caught.value))
    assert len(texts) == 1, texts


@pytest.mark.parametrize(("name", "shown"), [("python", "Python"), ("tensorflow", "TensorFlow")])
def test_other_versions_may_differ_and_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, shown: str
) -> None:
    own = {**versions.own_versions(), "tensorflow": "2.21.0", "python": "3.11"}
    monkeypatch.setattr("hostopt.transport.meeting.own_versions", lambda: own)
    found = meeting(0)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found.check(1, {**found.hello(), "rank": 1, name: "2.15.1"})
            found.check(2, {**found.hello(), "rank": 2, name: None})
    (record,) = caplog.records
    assert f"{NAMES[0]} has {shown} {own[name]}, {NAMES[1]} has {shown} 2.15.1. " in record.message


def test_ranks_with_other_versions_of_hostopt(processes: NewRing) -> None:
    ring = processes(2)
    script = """
        import sys
        from hostopt import versions
        versions.VERSION = sys.argv[1]
        import hostopt
        hostopt.connect()
    """
    started = [ring.start(rank, script, f"0.{rank + 1}.0") for rank in range(2)]
    for process in started:
        assert process.exit_code() == 78, process.stderr
        found = f"{ring.name(0)} has hostopt 0.1.0, {ring.name(1)} has hostopt 0.2.0. Install "
        assert found in process.stderr
