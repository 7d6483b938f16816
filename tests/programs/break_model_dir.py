"""Runs several trainings, each with a fault in the model_dir of rank 0.

The settings are those of train.py. Each of "cells" has a name, which is also the name of its
model_dir, and may override settings. "at_start" and "at_step" name the faults before the training
and before a step. All faults are undone after the training.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arguments
import train
from session_hooks import BeforeStep

NOBODY = 65534
STEP = 2  # the fault occurs before this step; the next checkpoint is written after it

Undo = contextlib.ExitStack


def limit_files(undo: Undo, largest_bytes: int) -> None:
    """Limits the size of files, like a full disk or a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_bytes, before[1]))
    undo.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)


def full_for_events(directory: Path, undo: Undo) -> None:
    limit_files(undo, max(path.stat().st_size for path in directory.glob("events.*")))


def full_for_graph(directory: Path, undo: Undo) -> None:
    limit_files(undo, (directory / "graph.pbtxt").stat().st_size // 2)


def full_for(name: str) -> Callable[[Path, Undo], None]:
    """Simulates a full disk for one small file."""

    def fill(directory: Path, undo: Undo) -> None:
        directory.mkdir(exist_ok=True)
        (directory / name).symlink_to("/dev/full")

    return fill


def directory_at(name: str) -> Callable[[Path, Undo], None]:
    def replace(directory: Path, undo: Undo) -> None:
        with contextlib.suppress(FileNotFoundError):
            (directory / name).unlink()
        (directory / name / "taken").mkdir(parents=True)
        undo.callback(shutil.rmtree, directory / name)

    return replace


def file_at(name: str) -> Callable[[Path, Undo], None]:
    def replace(directory: Path, undo: Undo) -> None:
        directory.mkdir(exist_ok=True)
        (directory / name).write_text("taken")

    return replace


def read_only(directory: Path, undo: Undo) -> None:
    """Removes write permission; root gives up its privileges, too."""
    directory.chmod(0o555)
    undo.callback(directory.chmod, 0o755)
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
        undo.callback(os.seteuid, 0)


def replaced(directory: Path, undo: Undo) -> None:
    shutil.rmtree(directory)
    directory.write_text("no directory")


def broken_where_nobody_reads(directory: Path, undo: Undo) -> None:
    for pattern in ("*.meta", "graph.pbtxt", "events.*", "hostopt-training-ended.json"):
        for path in directory.glob(pattern):
            path.write_text("no such content")


def events_deleted(directory: Path, undo: Undo) -> None:
    for path in directory.glob("events.*"):
        path.unlink()


HAPPENINGS: dict[str, Callable[[Path, Undo], None]] = {
    "full for the checkpoint": lambda directory, undo: limit_files(undo, 1 << 20),
    "full for the state of the data": full_for("model.ckpt-3.input.tmp"),
    "full for events": full_for_events,
    "full for graph.pbtxt": full_for_graph,
    "full for the marker": full_for("hostopt-training-ended.json.tmp"),
    "read-only": read_only,
    "deleted": lambda directory, undo: shutil.rmtree(directory),
    "replaced": replaced,
    "directory at the state of the data": directory_at("model.ckpt-3.input"),
    "directory at the index": directory_at("model.ckpt-3.index"),
    "directory at the meta graph": directory_at("model.ckpt-3.meta"),
    "directory at checkpoint": directory_at("checkpoint"),
    "directory at graph.pbtxt": directory_at("graph.pbtxt"),
    "directory at the marker": directory_at("hostopt-training-ended.json"),
    "file at hostopt-debug": file_at("hostopt-debug"),
    "file at eval": file_at("eval"),
    "file at the parts": file_at("model.ckpt-3_temp"),
    "broken where nobody reads": broken_where_nobody_reads,
    "events are deleted": events_deleted,
    "checkpoint is deleted": lambda directory, undo: (directory / "checkpoint").unlink(),
}


def run(cell: dict, settings: dict) -> None:
    is_first = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0
    directory = Path(settings["model_dir"]) / settings["optimizers"][0]
    with contextlib.ExitStack() as undo:

        def happen(when: str) -> None:
            for name in cell.get(when, []) if is_first else []:
                HAPPENINGS[name](directory, undo)

        original = train.train

        def train_with_hook(estimator: Any, input_fn: Any, hooks: list, settings: dict) -> None:
            original(
                estimator,
                input_fn,
                [*hooks, BeforeStep(STEP + 1, lambda _: happen("at_step"))],
                settings,
            )

        train.train = train_with_hook
        undo.callback(setattr, train, "train", original)
        happen("at_start")
        train.main({**train.SETTINGS, **settings})


if __name__ == "__main__":
    chosen = arguments.chosen()
    for cell in chosen.pop("cells"):
        model_dir = str(Path(chosen["model_dir"]) / cell["name"])
        settings = {**chosen, **cell.get("settings", {}), "model_dir": model_dir}
        Path(model_dir).mkdir(exist_ok=True)
        train.report(lambda c=cell, s=settings: run(c, s))
