"""Programs for Horovod and SageMaker's library run on two ranks with another import line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import PROGRAMS
from ranks import Ranks

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
    """Writes data and a program with its import line changed; returns the program's path."""
    random = np.random.default_rng(0)
    images = random.random((1280, 784), np.float32)
    np.savez(directory / "data.npz", x=images, y=random.integers(0, 10, 1280))
    text = (PROGRAMS / program).read_text()
    for old, new in (CASES[program], *edits):
        assert text.count(old) == 1
        text = text.replace(old, new)
    copy = directory / program
    copy.write_text(text)
    return str(copy)


@pytest.mark.parametrize("program", CASES)
def test_two_ranks_train_one_model(ranks: Ranks, tmp_path: Path, program: str) -> None:
    ranks.run(edited(tmp_path, program), 2, arguments=[str(tmp_path)])
    first, second = (dict(np.load(tmp_path / f"weights-{rank}.npz")) for rank in range(2))
    for name, value in first.items():
        assert np.array_equal(value, second[name]), name


def test_ranks_with_different_learning_rates_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    edit = ("0.01 * hvd.size()", "0.01 * (hvd.rank() + 1)")
    program = edited(tmp_path, "hvd_estimator.py", edit)
    for rank in ranks.run(program, 2, arguments=[str(tmp_path)], codes=[65]):
        assert (
            "after the training variable 'batch_normalization/beta' and 5 more differ between "
            "rank 0 (worker:0, "
        ) in rank.output
