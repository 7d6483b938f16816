"""Horovod's API for Keras 2 and Keras 3, on two ranks that `hostopt run` starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import PROGRAMS, run_python
from keras_ranks import HAS_KERAS_3

KERAS_2, KERAS_3 = "hostopt.tensorflow.keras", "hostopt.keras"


@pytest.mark.parametrize("switch", ["1", "0"])
def test_a_program_of_horovod_with_another_import(tmp_path: Path, switch: str) -> None:
    program = [str(PROGRAMS / "keras_mnist.py"), "--directory", str(tmp_path)]
    done = run_python(*program, ranks=2, code=None, TF_USE_LEGACY_KERAS=switch)
    if switch == "0" and HAS_KERAS_3:
        assert done.returncode != 0
        assert "a callback for Keras 2 is given to a model of keras" in done.stderr
        assert "Import hostopt.keras instead" in done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    result = re.findall(r"^\[\S+\] (loss .*, accuracy ([0-9.]+), lr 0.0100)$", done.stdout, re.M)
    assert len(result) == 2
    assert result[0] == result[1]  # averaged over the ranks
    assert float(result[0][1]) > 0.85
    assert done.stdout.count("Epoch 2: warm-up ended at learning rate 0.1") == 1
    assert len(list(tmp_path.glob("checkpoint-*.keras"))) == 6
