"""Reductions within a step: as in one process on whole batches, or refused."""

from __future__ import annotations

import pytest
from halves import Halves
from programs.step_reductions import CASES
from reduction_checks import STEPS, check_equal, check_refused

EQUAL = [
    "number of examples",
    "accumulated",
    "through a sum, all_reduce",
    "skipped by all",
]
REFUSED = ["through a gradient", "skipped by some"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Halves:
    names = [*EQUAL, *REFUSED]
    return Halves(tmp_path_factory.mktemp("cases"), "step_reductions.py", names, STEPS)


@pytest.mark.parametrize("name", [*EQUAL, *REFUSED])
def test_two_ranks_equal_one_process_or_are_refused(trained: Halves, name: str) -> None:
    (case,) = [case for case in CASES if case.name == name]
    check = check_refused if case.refused else check_equal
    check(trained, case)
