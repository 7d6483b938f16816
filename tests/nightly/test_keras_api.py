"""Horovod's API for Keras 2 and Keras 3, on two ranks that `hostopt run` starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import PROGRAMS, run_python
from keras_ranks import HAS_KERAS_3

KERAS_2, KERAS_3 = "hostopt.tensorflow.keras", "hostopt.keras"
MODULES = [KERAS_2, KERAS_3] if HAS_KERAS_3 else [KERAS_2]


def run_checks(program: str, *arguments: str) -> set[str]:
    """Runs a program of checks on two ranks, and returns the names of those that both passed."""
    done = run_python(PROGRAMS / program, *arguments, ranks=2)
    lines = re.findall(r"^\[(\S+)\] (?:passed|equal): (.*)$", done.stdout, re.MULTILINE)
    by_rank = [{name for task, name in lines if task == rank} for rank in ("chief:0", "worker:0")]
    assert by_rank[0] == by_rank[1]
    return by_rank[0]


@pytest.mark.parametrize("module", MODULES)
def test_two_ranks_equal_one_process(module: str, tmp_path: Path) -> None:
    families = ["new", "legacy"] if module == KERAS_2 else ["new"]
    checks = ["clipnorm and schedule", "global_clipnorm", "repeated rows in two passes", "loaded"]
    checks.append("unused variable in two passes")
    if module == KERAS_2:
        checks.append("changed gradients")
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
    done = run_python("-c", code, code=None)
    assert done.returncode != 0
    if HAS_KERAS_3:
        assert "Set KERAS_BACKEND=tensorflow in the environment" in done.stderr
    else:
        assert "Import hostopt.tensorflow.keras instead" in done.stderr
