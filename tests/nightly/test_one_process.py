"""Programs that do not know of ranks, at random: equal to one process, or refused."""

from __future__ import annotations

import itertools

import pytest
from halves import Halves
from one_process_checks import check_program, train_programs
from programs.one_process import NONLINEAR, Program, chosen

SEED, COUNT = 32, 80
CHOSEN = [program for program in chosen(SEED, COUNT) if not program.is_of_version_2]
CHOSEN += [
    Program(*names, pipeline)
    for names, pipeline in zip(
        itertools.product(
            NONLINEAR, ("clipped", "accumulated", "if small", "adam of tf.gradients")
        ),
        itertools.cycle(("shuffled", "smaller last batch", "generator")),
    )
]


@pytest.fixture(scope="module", params=["v2", "v1"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def trained(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Halves:
    return train_programs(tmp_path_factory.mktemp("programs"), CHOSEN, kind == "v1")


@pytest.mark.parametrize("program", CHOSEN, ids=lambda program: program.name)
def test_two_ranks_equal_one_process_or_are_refused(
    trained: Halves, kind: str, program: Program
) -> None:
    check_program(trained, program, kind == "v1")
