"""Programs that do not know of ranks, on two ranks and in one process: equal, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from halves import Halves
from programs.one_process import Program

STEPS = 20
TOLERANCE = 1e-5


def train_programs(directory: Path, programs: Sequence[Program], without_v2: bool) -> Halves:
    """Trains programs of programs/one_process.py as `Halves` does."""
    names = [program.name for program in programs]
    return Halves(directory, "one_process.py", names, STEPS, without_v2)


def check_program(trained: Halves, program: Program, without_v2: bool = False) -> None:
    """Checks that the ranks trained as one process did, or that both were refused."""
    assert trained.outcome(program.name, "alone") == {"steps": STEPS, "error": None}
    if not program.is_refused(without_v2):
        trained.check_ranks_equal(program.name)
        trained.check_equal(program.name, TOLERANCE)
        return
    outcomes = [trained.outcome(program.name, rank) for rank in (0, 1)]
    assert {outcome["steps"] for outcome in outcomes} == {0}, f"{program.name} was trained"
    # a rank that hears of it before it looks itself reports the other's error
    assert 78 in {outcome["error"]["code"] for outcome in outcomes} <= {78, 200}, outcomes
