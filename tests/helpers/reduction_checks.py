"""Reductions within a step, on two ranks and in one process: equal, or refused."""

from __future__ import annotations

import re

import numpy as np
from halves import Halves
from programs.step_reductions import Case
from summaries import summaries

STEPS = 4
TOLERANCE = 1e-9


def check_equal(trained: Halves, case: Case) -> None:
    """Checks that the ranks trained as one process did, and reported its losses."""
    assert trained.outcome(case.name, "alone") == {"steps": STEPS, "error": None}
    trained.check_ranks_equal(case.name)
    trained.check_equal(case.name, TOLERANCE)
    if case.has_losses:
        expected = losses(trained, 1, case.name)
        assert len(expected) == STEPS
        np.testing.assert_allclose(losses(trained, 2, case.name), expected, rtol=1e-6)


def losses(trained: Halves, size: int, name: str) -> list[float]:
    """Returns the summaries of the chief, step by step."""
    return [value for _, _, value in summaries(trained.model_dir(size, name), "loss")]


def check_refused(trained: Halves, case: Case) -> None:
    """Checks that one process trained, and both ranks were refused before their first step."""
    assert trained.outcome(case.name, "alone") == {"steps": STEPS, "error": None}
    for rank in (0, 1):
        outcome = trained.outcome(case.name, rank)
        assert outcome["steps"] == 0
        assert outcome["error"] is not None
        assert outcome["error"]["code"] == 78, outcome["error"]["text"]
        assert re.search(case.refused, outcome["error"]["message"])
