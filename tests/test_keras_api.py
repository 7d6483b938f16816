"""Horovod's API for Keras 2 and Keras 3, on two ranks that `hostopt run` starts."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import PROGRAMS, QUIET, ROOT, deadline_s

pytestmark = pytest.mark.tensorflow

KERAS_2, KERAS_3 = "hostopt.tensorflow.keras", "hostopt.keras"
HAS_KERAS_3 = not importlib.metadata.version("keras").startswith("2.")
MODULES = [KERAS_2, KERAS_3] if HAS_KERAS_3 else [KERAS_2]


def python(*arguments: str, ranks: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs Python, or that many ranks of it."""
    command = [sys.executable, *arguments]
    if ranks:
        command = [sys.executable, "-m", "hostopt.cli", "run", "-np", str(ranks), "--", *command]
    env = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT), **environ}
    limit_s = deadline_s(200)
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=limit_s, env=env
    )


def run_checks(program: str, *arguments: str) -> set[str]:
    """Runs a program of checks on two ranks, and returns the names of those that both passed."""
    done = python(str(PROGRAMS / program), *arguments, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^\[(\S+)\] (?:passed|equal): (.*)$", done.stdout, re.MULTILINE)
    by_rank = [{name for task, name in lines if task == rank} for rank in ("chief:0", "worker:0")]
    assert by_rank[0] == by_rank[1]
    return by_rank[0]


@pytest.mark.parametrize("switch", ["1", "0"])
def test_a_program_of_horovod_with_another_import(tmp_path: Path, switch: str) -> None:
    program = [str(PROGRAMS / "keras_mnist.py"), "--directory", str(tmp_path)]
    done = python(*program, ranks=2, TF_USE_LEGACY_KERAS=switch)
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


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_two_ranks_equal_one_process(module: str, tmp_path: Path) -> None:
    families = ["new", "legacy"] if module == KERAS_2 else ["new"]
    checks = ["clipnorm and schedule", "global_clipnorm", "repeated rows in two passes", "loaded"]
    checks.append("unused variable in two passes")
    passed = run_checks("keras_equality.py", module, str(tmp_path))
    assert passed == {f"{family} {check}" for family in families for check in checks}


@pytest.mark.parametrize("module", MODULES)
def test_callbacks_and_loss_scales(module: str) -> None:
    families = ["new", "legacy"] if module == KERAS_2 else ["new"]
    checks = ["broadcast before training", "broadcast after the first batch", "schedules"]
    checks += ["loaded on rank 0"]
    checks += ["staircase", "counted passes", "local layers"]
    checks += ["skipped step True", "skipped step False"]
    passed = run_checks("keras_callbacks.py", module)
    others = {"metrics", "automatic scale", "refusals", "collectives"}
    assert passed == {f"{family} {check}" for family in families for check in checks} | others


def test_another_keras_is_refused() -> None:
    # other backends are not installed
    code = "import keras; keras.backend.backend = lambda: 'jax'; import hostopt.keras"
    done = python("-c", code)
    assert done.returncode != 0
    if HAS_KERAS_3:
        assert "Set KERAS_BACKEND=tensorflow in the environment" in done.stderr
    else:
        assert "Import hostopt.tensorflow.keras instead" in done.stderr
