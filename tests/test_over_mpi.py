"""Collectives over MPI, under real launchers: results, faults and ends."""

from __future__ import annotations

import json
import sys

import pytest
from harness import PROGRAMS
from mpirun import LAUNCHERS, run

pytestmark = [pytest.mark.launchers]

COLLECTIVES = PROGRAMS / "mpi_collectives.py"


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_collectives_are_those_of_numpy(launcher: str, size: int) -> None:
    result = run(launcher, size, sys.executable, COLLECTIVES)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert sorted(line["rank"] for line in lines) == list(range(size))
    assert {line["size"] for line in lines} == {size}
    assert min(line["checks"] for line in lines) > 1000
