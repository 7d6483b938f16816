"""Kinds of updates, trained by one process and by two ranks: equal, or refused."""

from __future__ import annotations

import re
from typing import Any

from halves import Halves
from programs.update_kinds import Kind

STEPS = 4
ROUNDING = {"float64": 1e-6, "float32": 1e-5}  # all else is larger
STEPS_OF_REFUSED = {"refused": {0}, "mismatch": {0, 1}, "late mismatch": {STEPS}}
CURES = (
    "estimator_ext.reduce_gradients",
    "Use the optimizer that it wraps",
    "outside of the branch, loop or function",
    "let the branch depend on a value that is reduced",
    "initialize that variable with a constant",
    "Use nonfinite='error'",
)


def check_update(trained: Halves, kind: Kind) -> None:
    """Checks that the ranks trained as one process did, or were refused as the table says."""
    assert trained.outcome(kind.name, "alone") == {"steps": STEPS, "error": None}
    outcomes = [trained.outcome(kind.name, rank) for rank in (0, 1)]
    codes = [outcome["error"]["code"] for outcome in outcomes if outcome["error"]]
    result = "refused" if 78 in codes else "mismatch" if 65 in codes else "trained"
    if result == "mismatch" and outcomes[0]["steps"] == STEPS:
        result = "late mismatch"
    expected = [each for each in kind.expected.split("|") if sort_of(each) == result]
    if result != "trained" and expected:
        check_refused(outcomes, expected[0])
        return
    trained.check_ranks_equal(kind.name, kind.per_rank)  # shows the error, if there is one
    assert expected, f"{kind.name} was trained, wanted {kind.expected}: {kind.note}"
    if expected[0] != "alike":
        trained.check_equal(kind.name, ROUNDING[kind.dtype], kind.per_rank)


def sort_of(expected: str) -> str:
    sort = expected.partition(":")[0]
    return sort if sort in STEPS_OF_REFUSED else "trained"


def check_refused(outcomes: list[dict[str, Any]], expected: str) -> None:
    """Checks that no rank ran more than one step, and that the error names all that is needed."""
    sort, _, words = expected.partition(": ")
    assert {outcome["steps"] for outcome in outcomes} <= STEPS_OF_REFUSED[sort]
    errors = [outcome["error"] for outcome in outcomes]
    # a rank that hears of it before it looks itself reports the other's error
    assert {error["code"] for error in errors} <= {78, 65, 200}
    for error in errors:
        assert all(word in error["message"] for word in words.split("; ")), error["message"]
        if words != "SyncReplicasOptimizer":  # which has not seen a variable yet
            assert re.search(r"'(weights|bias|table)'", error["message"]), error["message"]
        if sort == "refused":
            assert any(cure in error["message"] for cure in CURES), error["message"]
