"""Programs for Horovod and SageMaker's library run on two ranks with another import line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import PROGRAMS
from ranks import Ranks
from runner import horovod_data, horovod_weights

# program, its import line, and ours
CASES = {
    "hvd_estimator.py": (
        "import horovod.tensorflow as hvd",
        "import estimator_ext.horovod as hvd",
    ),
    "hvd_tape.py": ("import horovod.tensorflow as hvd", "import hostopt.tensorflow as hvd"),
    "sdp_tape.py": (
        "import smdistributed.dataparallel.tensorflow as sdp",
        "import hostopt.tensorflow as sdp",
    ),
}


def edited(directory: Path, program: str, *edits: tuple[str, str]) -> str:
    """Writes a program with its import line changed, and its data; returns its path."""
    horovod_data(directory)
    text = (PROGRAMS / program).read_text()
    for old, new in (CASES[program], *edits):
        assert text.count(old) == 1
        text = text.replace(old, new)
    copy = directory / program
    copy.write_text(text)
    return str(copy)


@pytest.mark.parametrize("program", CASES)
def test_two_ranks_train_one_model(ranks: Ranks, tmp_path: Path, program: str) -> None:
    ranks.run(edited(tmp_path / "two", program), 2, arguments=[str(tmp_path / "two")])
    first, second = horovod_weights(tmp_path / "two", 2)
    for name, value in first.items():
        assert np.array_equal(value, second[name]), name


def test_a_local_variable_may_differ_between_ranks(ranks: Ranks, tmp_path: Path) -> None:
    minimize = "    train_op = optimizer.minimize("
    register = "    optimizer.register_local_var(v1.trainable_variables()[0])\n"
    program = edited(tmp_path / "two", "hvd_estimator.py", (minimize, register + minimize))
    ranks.run(program, 2, arguments=[str(tmp_path / "two")])
    first, second = horovod_weights(tmp_path / "two", 2)
    # Momentum's slot of the local variable differs as well
    differing = {name for name in first if not np.array_equal(first[name], second[name])}
    assert differing == {"conv2d/kernel", "conv2d/kernel/Momentum"}


def test_ranks_with_different_learning_rates_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    edit = ("0.01 * hvd.size()", "0.01 * (hvd.rank() + 1)")
    program = edited(tmp_path / "two", "hvd_estimator.py", edit)
    for rank in ranks.run(program, 2, arguments=[str(tmp_path / "two")], codes=[65]):
        assert (
            "after the training variable 'batch_normalization/beta' and 5 more differ between "
            "rank 0 (worker:0, "
        ) in rank.output
