"""Runs programs that train with Keras 2: in one process without a strategy, and on two ranks."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import numpy as np
from ranks import Ranks

HAS_KERAS_3 = not importlib.metadata.version("keras").startswith("2.")
ENVIRON = {"TF_USE_LEGACY_KERAS": "1", "HOSTOPT_COLLECTIVE_TIMEOUT_S": "60"}


def results_of(program: str, directory: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the results of one process, and those of each of two ranks."""
    results = []
    with Ranks(directory) as ranks:
        for size, arguments in [(1, ["single"]), (2, [])]:
            done = ranks.run(
                program, size, arguments=[str(directory), *arguments], environ=ENVIRON
            )
            results += [
                json.loads(each.output.split("RESULT ")[1].split("\n")[0]) for each in done
            ]
    return results[0], results[1:]


def leaves(value: Any) -> list[float]:
    """Returns the numbers of a nested value."""
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if not isinstance(value, list):
        return [value]
    return [number for each in value for number in leaves(each)]


def assert_equal(actual: Any, expected: Any, name: str = "") -> None:
    actual, expected = leaves(actual), leaves(expected)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5, err_msg=name)
