"""The documented times are those of the code."""

from __future__ import annotations

import re

import pytest
from harness import ROOT

from hostopt.transport.grpc.timing import DEFAULT

DOCUMENTATION = (ROOT / "docs/wire.md").read_text()


@pytest.mark.parametrize(
    ("event", "times_s"),
    [
        ("one `Hello` call", [DEFAULT.hello_timeout_s]),
        ("warning that names the missing ranks", [DEFAULT.progress_every_s]),
        ("the answer to `Status`", [DEFAULT.status_timeout_s]),
        ("goodbye", [DEFAULT.leave_timeout_s]),
        ("ping to a silent peer", [DEFAULT.keepalive_s, DEFAULT.ping_timeout_s]),
    ],
)
def test_deadlines(event: str, times_s: list[float]) -> None:
    row = re.search(rf"^\| {event}[^|]*\|([^|]*)\|", DOCUMENTATION, re.MULTILINE)
    assert row is not None
    assert [float(number) for number in re.findall(r"[\d.]+", row[1])] == times_s


def test_time_that_a_rank_stays_after_an_auth_error() -> None:
    assert f"answers for {DEFAULT.auth_linger_s:g} s more" in " ".join(DOCUMENTATION.split())
