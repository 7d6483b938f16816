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


def train(ranks: Ranks, directory: Path, program: str, size: int) -> list[dict[str, np.ndarray]]:
    """Runs a program with its import line changed; returns the weights of each rank."""
    directory.mkdir()
    random = np.random.default_rng(0)
    images = random.random((1280, 784), np.float32)
    np.savez(directory / "data.npz", x=images, y=random.integers(0, 10, 1280))
    text = (PROGRAMS / program).read_text()
    old, new = CASES[program]
    assert text.count(old) == 1
    copy = directory / program
    copy.write_text(text.replace(old, new))
    ranks.run(str(copy), size, arguments=[str(directory)])
    return [dict(np.load(directory / f"weights-{rank}.npz")) for rank in range(size)]


@pytest.mark.parametrize("program", CASES)
def test_two_ranks_train_one_model(ranks: Ranks, tmp_path: Path, program: str) -> None:
    first, second = train(ranks, tmp_path / "two", program, 2)
    for name, value in first.items():
        assert np.array_equal(value, second[name]), name
