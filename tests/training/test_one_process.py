"""Programs that do not know of ranks train as in one process, or are refused."""

from __future__ import annotations

import pytest
from halves import Halves
from one_process_checks import check_program, train_programs
from programs.one_process import Program

# one for each way in which a loss is reduced, and each way of its gradient to a variable
CHOSEN = [
    Program("mean", "accumulated", "shuffled"),
    Program("mean", "if small", "smaller last batch"),
    Program("branch of sums", "tape", "static"),
    Program("function", "added in a loop"),
    Program("compute_average_loss", "descent"),
    Program("sum / batch", "descent", "smaller last batch"),
    Program("sum", "frozen at first", "static"),
    Program("sum and penalty", "descent"),
    Program("mean and penalty of a sum", "descent"),
    Program("mean and sum", "of a function"),
    Program("small sum", "descent"),
    Program("mean", "of a loop, noise"),
    Program("sum / weights", "descent", "smaller last batch"),
    Program("mean of chosen", "clipped", "shuffled"),
    Program("tf.losses, weights", "accumulated"),
    Program("root of a mean", "descent", "smaller last batch"),
    Program("mean", "of parts"),
    Program("mean", "of parts, stacked"),
    Program("mean", "of parts, clipped"),
    Program("mean", "of parts, clipped into a variable"),
    Program("mean", "of parts, strided"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Halves:
    return train_programs(tmp_path_factory.mktemp("programs"), CHOSEN, without_v2=False)


@pytest.mark.parametrize("program", CHOSEN, ids=lambda program: program.name)
def test_two_ranks_equal_one_process_or_are_refused(trained: Halves, program: Program) -> None:
    check_program(trained, program)
