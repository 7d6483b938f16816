"""Progress of a task, which it writes to a file for `hostopt run` to show."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Mapping
from typing import Any

# Set by `hostopt run`: file to which a task writes its progress.
VARIABLE = "HOSTOPT_PROGRESS_FILE"
# Metrics of which more is better; of the others the loss counts, of which less is better.
_RISING = ("accuracy", "auc", "f1", "recall", "precision")
_path: str | None = None
_sections: dict[str, dict[str, Any]] = {}
_lock = threading.Lock()


def is_written() -> bool:
    """Returns True if `hostopt run` reads the progress of this process."""
    return _path is not None or VARIABLE in os.environ


def write_progress(section: str, values: dict[str, Any]) -> None:
    """Replaces "training" or "evaluation" of the progress that `hostopt run` reads, if it does."""
    global _path  # noqa: PLW0603
    with _lock, contextlib.suppress(OSError, TypeError, ValueError):  # never worth an error
        _path = os.environ.pop(VARIABLE, _path)  # it is not for processes that this one starts
        _sections[section] = values
        if _path is None:
            return
        temporary = f"{_path}.{os.getpid()}"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(_sections, file)
        os.replace(temporary, _path)


def read_progress(path: str) -> dict[str, dict[str, Any]]:
    """Returns the sections of a task's progress by name; none if it has not written any."""
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        sections: dict[str, dict[str, Any]] = json.load(file)
        return sections
    return {}


def main_metric(metrics: Mapping[str, float]) -> tuple[str, float, int]:
    """Returns the metric to show, accuracy or the loss: name, value, 1 or -1 if less is better."""
    name = next((name for name in _RISING if name in metrics), "loss")
    return name, metrics.get(name, math.nan), 1 if name in _RISING else -1
