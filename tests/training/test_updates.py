"""Updates that forget the reduction: mended, or refused before the first step."""

from __future__ import annotations

import pytest
from halves import Halves
from programs.update_kinds import KINDS
from update_checks import STEPS, check_update

# a kind for each way to a variable, and the main reasons of a refusal; all of them train at night
CHOSEN = [
    "adam",
    "tape, apply",
    "own apply_gradients, slots",
    "assign_sub",
    "accumulated",
    "in cond",
    "sync replicas",
    "branch of the batch",
    "queue",
    "Python, another by rank",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Halves:
    return Halves(tmp_path_factory.mktemp("kinds"), "update_kinds.py", CHOSEN, STEPS)


@pytest.mark.parametrize("name", CHOSEN)
def test_an_update_is_reduced_or_refused(trained: Halves, name: str) -> None:
    (kind,) = [kind for kind in KINDS if kind.name == name]
    check_update(trained, kind)
