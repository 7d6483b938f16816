"""Ranks that make different calls: all of them raise an error that names both calls and ranks."""

from __future__ import annotations

import re

import pytest
from rings import NewRing

PROGRAM = """
    import sys
    import numpy as np
    import hostopt

    with hostopt.connect() as communicator:
        names = ["a", "b"] if communicator.rank else ["b", "a"]
        for name in names:
            getattr(communicator, sys.argv[1])(np.ones(2, np.float32), name=name)
"""


@pytest.mark.parametrize("communication", ["grpc", "shm"])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "broadcast"])
def test_processes_with_calls_in_different_order(
    processes: NewRing, kind: str, communication: str
) -> None:
    ring = processes(2)
    started = ring.start_all(PROGRAM, kind, HOSTOPT_COMMUNICATION=communication)
    assert [process.exit_code() for process in started] == [65, 65]
    for process in started:
        for rank, name in enumerate("ba"):
            called = rf"calls {kind}\S*( from rank 0)? of '{name}' float32\[2\]"
            assert re.search(f"{re.escape(ring.name(rank))} {called}", process.stderr)
