"""The size of the largest message if no option sets it."""

from __future__ import annotations

import os

import pytest

from hostopt.cluster.cluster import Cluster, Task
from hostopt.options import Options
from hostopt.transport.inproc import InprocTransport

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("hosts", "cores", "expected"),
    [
        (["10.0.0.1", "10.0.0.2"], 2, 512 * KIB),
        (["127.0.0.1", "10.0.0.2", "10.0.0.3"], 2, 512 * KIB),
        (["127.0.0.1", "localhost"], 2, 2 * MIB),
        (["127.0.0.1", "localhost", "[::1]"], 2, 8 * MIB),
        (["127.0.0.1"] * 8, None, 8 * MIB),
    ],
)
def test_messages_suit_the_line_and_the_cores(
    monkeypatch: pytest.MonkeyPatch, hosts: list[str], cores: int | None, expected: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    ring = tuple(Task("worker", index, f"{host}:1") for index, host in enumerate(hosts))
    of_each_rank = {
        InprocTransport(Cluster(task, ring), Options(), []).segment_bytes for task in ring
    }
    assert of_each_rank == {expected}
    assert InprocTransport(Cluster(ring[0], ring), Options(segment_bytes=7), []).segment_bytes == 7
