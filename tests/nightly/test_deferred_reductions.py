"""Reductions anywhere in a step: as in one process on whole batches, or refused."""

from __future__ import annotations

import pytest
from halves import Halves
from programs.step_reductions import CASES, Case
from reduction_checks import STEPS, check_equal, check_refused


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Halves:
    """Trains all selected cases in one pair of processes."""
    items = [item for item in request.session.items if item.module is request.module]
    asked = [item for item in items if hasattr(item, "callspec")]
    chosen = dict.fromkeys(item.callspec.params["case"].name for item in asked)
    return Halves(tmp_path_factory.mktemp("cases"), "step_reductions.py", [*chosen], STEPS)


def cases(refused: bool) -> pytest.MarkDecorator:
    chosen = [case for case in CASES if bool(case.refused) == refused]
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case.name)


@cases(refused=False)
def test_two_ranks_equal_one_process(trained: Halves, case: Case) -> None:
    check_equal(trained, case)


@cases(refused=True)
def test_a_program_without_an_equivalent_is_refused(trained: Halves, case: Case) -> None:
    check_refused(trained, case)
