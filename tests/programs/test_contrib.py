"""Programs with names of tf.contrib: two ranks train as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import PROGRAMS
from published import check_equals_single, check_ranks_equal, copy_first_checkpoints, run

PROGRAM = str(PROGRAMS / "contrib_tagger.py")


@pytest.mark.parametrize("optimizer", ["LazyAdam", "AdamW"])
def test_two_ranks_train_a_tagger_as_one_process(tmp_path: Path, optimizer: str) -> None:
    for size in (1, 2):
        directory = tmp_path / str(size)
        if size == 2:
            copy_first_checkpoints(tmp_path / "1", directory)
        program = [PROGRAM, str(directory / "model"), str(16 // size), optimizer]
        run(directory, size, program, ["--v1"])
    check_ranks_equal(tmp_path / "2")
    check_equals_single(tmp_path / "2", tmp_path / "1")
