"""Every collective of hostopt.tensorflow, eagerly, in functions and in graphs, against numpy."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import Ranks

CASES: list[Any] = [("grpc", 2), ("shm", 2)]
SLOW = [("auto", 1), ("grpc+tcp", 2), ("grpc", 3), ("shm", 3), ("grpc+tcp", 4), ("shm", 4)]


@pytest.mark.parametrize(
    ("communication", "size"),
    [*CASES, *SLOW],
)
def test_all_collectives_are_exact(ranks: Ranks, communication: str, size: int) -> None:
    environ = {
        "HOSTOPT_COMMUNICATION": communication,
        "HOSTOPT_SEGMENT_BYTES": "1024",
        "HOSTOPT_COLLECTIVE_TIMEOUT_S": "60",
    }
    for rank in ranks.run("collectives.py", size, environ=environ):
        assert "made 120 calls in 4 ways" in rank.output
