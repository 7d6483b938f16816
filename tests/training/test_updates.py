"""Updates that forget the reduction: mended, or refused before the first step."""

from __future__ import annotations

import pytest
from halves import Halves
from programs.update_kinds import KINDS
from update_checks import check_update, train_kinds

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
    return train_kinds(tmp_path_factory.mktemp("kinds"), CHOSEN)


@pytest.mark.parametrize("name", CHOSEN)
def test_an_update_is_reduced_or_refused(trained: Halves, name: str) -> None:
    (kind,) = [kind for kind in KINDS if kind.name == name]
    check_update(trained, kind)
