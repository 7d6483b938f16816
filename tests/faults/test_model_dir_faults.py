"""Faults of each file of model_dir: one typed error on all ranks, and no lost checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from one_weight import model_fn
from ranks import Ranks, caught

import estimator_ext
import hostopt
from estimator_ext.checkpoints import input_state_file
from estimator_ext.checkpoints.reading import check_newest, is_intact
from estimator_ext.evaluation.evaluation import MARKER, EndMarker

estimator_ext.install()


NOBODY = 65534
NAMED = hostopt.CheckpointError.exit_code


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory that an unprivileged process can read, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    """Runs the block as an unprivileged user, because root may access all files."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


# -- reading -------------------------------------------------------------------------------

DATA = "data-00000-of-00001"
FILES = ["checkpoint", "model.ckpt-15.index", f"model.ckpt-15.{DATA}", "model.ckpt-15.input"]


def save(directory: Path, steps: tuple[int, ...], first: float = 1.0) -> None:
    """Saves checkpoints of a training with its input state."""
    directory.mkdir(exist_ok=True)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.get_variable("kernel", initializer=tf.range(first, first + 99.0))
        step = tf.compat.v1.train.create_global_step()
        saver = tf.compat.v1.train.Saver(sharded=True, save_relative_paths=True)
        session.run(tf.compat.v1.global_variables_initializer())
        for number in steps:
            session.run(step.assign(number))
            part = int(first).to_bytes(400, "big")
            state = input_state_file.pack({"pipelines": [1], "parts": [1]}, [part])
            attributes = {"process": "another", "step": str(number)}
            input_state_file.write(
                str(directory / f"model.ckpt-{number}"), attributes, [state, state]
            )
            saver.save(session, str(directory / "model.ckpt"), global_step=number)


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 4
    path.write_bytes(content)


def replace_by_directory(path: Path) -> None:
    path.unlink()
    (path / "taken").mkdir(parents=True)


def take_from_another_run(path: Path) -> None:
    """Replaces a file by that of a run with other values."""
    other = path.parent.parent / "other"
    save(other, (15,), first=7.0)
    if path.name == "checkpoint":
        (other / path.name).write_text('model_checkpoint_path: "model.ckpt-99"\n')
    shutil.copy(other / path.name, path)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "deleted": Path.unlink,
    "a directory": replace_by_directory,
    "another file": lambda path: path.write_bytes(b"what is this\n" * 40),
    "empty": lambda path: path.write_bytes(b""),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "cut by a byte": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "first bit": lambda path: flip(path, 0.0),
    "a bit": lambda path: flip(path, 0.3),
    "another run's": take_from_another_run,
    "unreadable": lambda path: path.chmod(0),
}
# Damages that are not errors, with the reason.
ACCEPTED = {
    ("model.ckpt-15.input", "deleted"): "the data are read from the beginning, with a warning",
    ("model.ckpt-15.input", "another run's"): "of the same step; other data start over",
    ("checkpoint", "cut by a byte"): "the end of a line",
}
# A directory in place of `checkpoint` cannot be replaced.
NOT_REPAIRED = {("checkpoint", "a directory")}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_reported_or_skipped(directory: Path, file: str, damage: str) -> None:
    model = directory / "model"
    save(model, (5, 10, 15))
    os.chmod(model, 0o777)  # an unprivileged process must be able to replace the file `checkpoint`
    DAMAGES[damage](model / file)
    model_dir = str(model)
    with without_rights():
        if (file, damage) in ACCEPTED:
            check_newest(model_dir, restore_previous=False)
            return
        before = {path.name for path in model.iterdir()}
        with pytest.raises(hostopt.CheckpointError) as error:
            check_newest(model_dir, restore_previous=False)
        intact = model / f"model.ckpt-{15 if file == 'checkpoint' else 10}"
        assert str(model / "model.ckpt-15") in str(error.value)
        assert f"The newest intact checkpoint is {intact}: to resume" in str(error.value)
        assert error.value.last_checkpoint == str(intact)
        if (file, damage) in NOT_REPAIRED:
            return
        check_newest(model_dir, restore_previous=True)
        assert tf.train.latest_checkpoint(model_dir) == str(intact)
        assert {path.name for path in model.iterdir()} - before <= {"checkpoint"}
        check_newest(model_dir, restore_previous=False)


# -- files of a killed process -------------------------------------------------------------


def test_files_of_a_killed_save_are_removed_when_training_starts(tmp_path: Path) -> None:
    drafts = [
        "model.ckpt-9_temp/part-00000-of-00001.data-00000-of-00001",
        f"model.ckpt-9.{DATA}.tempstate1234567",
        "model.ckpt-9.index.tempstate7654321",
        "model.ckpt-9.input.tmp",
        f"checkpoint.tmp{'0a' * 16}",
        f"graph.pbtxt.tmp{'1b' * 16}",
    ]
    of_others = [
        "ema-9_temp/part-00000-of-00001.data-00000-of-00001",
        f"ema-9.{DATA}.tempstate1234567",
        "checkpoint.tmp",
        "model.ckpt-best_temp/notes",
        f"model.ckpt-7.{DATA}",
    ]
    for name in drafts + of_others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("half")

    estimator_in(tmp_path).train(batches, max_steps=2)
    assert not any(exists(tmp_path, name) for name in drafts)
    assert all(exists(tmp_path, name) for name in of_others)
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-2")


def exists(directory: Path, name: str) -> bool:
    return (directory / name.partition("/")[0]).exists()


# -- processes that evaluate ---------------------------------------------------------------


def estimator_in(directory: Path) -> Any:
    config = estimator_ext.RunConfig(train_distribute=estimator_ext.HostOffloadStrategy())
    return estimator_ext.Estimator(model_fn, str(directory), config)


@pytest.mark.parametrize("kind", ["folder", "no rights"])
def test_an_unreadable_marker_is_named(directory: Path, kind: str) -> None:
    marker = directory / MARKER
    if kind == "folder":
        marker.mkdir()
    else:
        marker.touch(0)
    with without_rights(), pytest.raises(hostopt.CheckpointError, match=str(marker)):
        EndMarker(str(directory)).read()


@pytest.mark.parametrize("place", ["export", "export/best"])
def test_an_unwritable_export_is_named(tmp_path: Path, place: str) -> None:
    save_for_serving(tmp_path)
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("no folder")
    expected = pytest.raises(hostopt.CheckpointError, match=rf"write or read a file of .*{place}")
    with expected:
        estimator_in(tmp_path).export_saved_model(str(tmp_path / place), serving_input)
    assert is_intact(tf.train.latest_checkpoint(str(tmp_path)))


def test_an_unwritable_evaluation_is_named(tmp_path: Path) -> None:
    save_for_serving(tmp_path)
    (tmp_path / "eval").write_text("no folder")
    with pytest.raises(hostopt.CheckpointError, match=r"write or read a file of .*eval"):
        estimator_in(tmp_path).evaluate(batches, steps=1)


def batches() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(([[1.0]], [[1.0]])).repeat()


def serving_input() -> Any:
    features = tf.compat.v1.placeholder(tf.float32, [None, 1])
    return tf.estimator.export.ServingInputReceiver(features, features)


def save_for_serving(directory: Path) -> None:
    estimator_in(directory).train(batches, steps=1)


# -- writing, with two ranks ---------------------------------------------------------------

OURS = {"api": "ours"}
FREE = r" \([\d.]+ MB are needed, [\d.]+ MB are free\)"
# name, faults and settings, message of both ranks ("" for success), and message of the worker if
# it differs
CELLS: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("whole", {"settings": OURS}, "", None),
    (
        "whole",
        {"at_start": ["full for graph.pbtxt"], "settings": {"steps": 5}},
        r"cannot write or read a file of .*graph\.pbtxt.*File too large \([\d.]+ MB are free",
        None,
    ),
    (
        "whole",
        {"at_start": ["read-only"], "settings": {**OURS, "steps": 5}},
        "cannot save .*/hostopt-training.lock: .*Permission denied",
        None,
    ),
    (
        "whole",
        {"at_start": ["read-only"], "settings": {"steps": 5}},
        "cannot save .*/hostopt-training.lock: .*Permission denied",
        None,
    ),
    (
        "whole",
        {
            "at_start": ["broken where nobody reads"],
            "at_step": ["events are deleted"],
            "settings": {**OURS, "steps": 8},
        },
        "",
        None,
    ),
    (
        "full-checkpoint",
        {"at_step": ["full for the checkpoint"], "settings": {"hidden": 20000}},
        f"cannot save .*/model.ckpt-3: .*File too large{FREE}",
        None,
    ),
    (
        "full-input",
        {"at_step": ["full for the state of the data", "file at hostopt-debug"]},
        f"cannot save .*/model.ckpt-3.input: .*No space left on device{FREE}",
        None,
    ),
    (
        "full-events",
        {"at_step": ["full for events"], "settings": {"summary_steps": 1}},
        r"cannot write or read .*/events\.out.*",
        None,
    ),
    (
        "read-only",
        {"at_step": ["read-only"]},
        f"cannot save .*/model.ckpt-3.input: .*Permission denied{FREE}",
        None,
    ),
    (
        "deleted",
        {"at_step": ["deleted"]},
        "cannot save .*/hostopt-training.lock: .*No such file",
        None,
    ),
    (
        "replaced",
        {"at_step": ["replaced"]},
        "cannot save .*/hostopt-training.lock: .*ot a directory",
        None,
    ),
    (
        "input",
        {"at_step": ["directory at the state of the data"]},
        f"cannot save .*/model.ckpt-3.input: .*Is a directory{FREE}",
        None,
    ),
    (
        "index",
        {"at_step": ["directory at the index"]},
        f"cannot save .*/model.ckpt-3: .*Is a directory{FREE}",
        None,
    ),
    (
        "meta",
        {"at_step": ["directory at the meta graph"]},
        f"cannot save .*/model.ckpt-3: .*Is a directory{FREE}",
        None,
    ),
    (
        "parts",
        {"at_step": ["file at the parts"]},
        f"cannot save .*/model.ckpt-3: .*ot a directory{FREE}",
        None,
    ),
    (
        "checkpoint",
        {"at_step": ["directory at checkpoint"]},
        f"cannot save .*/model.ckpt-3: .*Is a directory{FREE}",
        None,
    ),
    (
        "graph",
        {"at_start": ["directory at graph.pbtxt"]},
        r"cannot write or read a file of .*graph\.pbtxt.*Is a directory \([\d.]+ MB are free",
        None,
    ),
    (
        "marker-at-start",
        {"at_start": ["directory at the marker"], "settings": OURS},
        "cannot write or read a file of .*hostopt-training-ended.json; Is a directory",
        None,
    ),
    (
        "marker-at-end",
        {"at_step": ["full for the marker"], "settings": OURS},
        f"cannot save .*hostopt-training-ended.json: .*No space left on device{FREE}",
        "",
    ),
    (
        "eval",
        {"at_step": ["file at eval"], "settings": OURS},
        "cannot write or read a file of .*/eval",
        "",
    ),
    ("checkpoint-deleted", {"at_step": ["checkpoint is deleted"]}, "", None),
    # another training in the model_dir of an earlier one
    (
        "checkpoint-deleted",
        {"at_start": ["checkpoint is deleted"], "settings": {"steps": 6}},
        "has no file `checkpoint`, .*, but model.ckpt-4, model.ckpt-3, model.ckpt-2 and 1 more. "
        "The newest intact checkpoint is .*model.ckpt-4: .* to start over, give another model_dir",
        None,
    ),
    (
        "index",
        {"settings": {"model": "variables", "steps": 6}},
        "a checkpoint in .* does not fit the model: Key kinds/.* not found",
        None,
    ),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """Errors of chief and worker for each cell, from one pair of processes."""
    logs = tmp_path_factory.mktemp("logs")
    with tempfile.TemporaryDirectory() as model_dir, Ranks(logs) as ranks:
        os.chmod(model_dir, 0o755)
        settings = {
            "model_dir": model_dir,
            "optimizers": ["adam"],
            "steps": 4,
            "checkpoint_steps": 1,
            "shuffled": True,
            "cells": [{"name": name, **cell} for name, cell, _, _ in CELLS],
        }
        arguments = [json.dumps(settings)]
        started = ranks.run("break_model_dir.py", 2, limit_s=360, arguments=arguments)
        yield [list(zip(*map(caught, started))), Path(model_dir)]


@pytest.mark.parametrize("number", range(len(CELLS)), ids=[cell[0] for cell in CELLS])
def test_a_failed_write_is_raised_on_both_ranks(outcomes: list[Any], number: int) -> None:
    """Both ranks raise the same error."""
    _, _, message, said_by_worker = CELLS[number]
    for error, text in zip(
        outcomes[0][number], (message, message if said_by_worker is None else "")
    ):
        if not text:
            assert error is None, error["text"]
            continue
        assert error is not None
        assert error["code"] == NAMED, error["text"]
        assert re.search(text, error["message"]), error["message"]


GONE = {
    "deleted",
    "replaced",
    "checkpoint",
    "graph",
    "marker-at-start",
}  # or none was saved
KEPT = sorted({cell[0] for cell in CELLS} - GONE)


@pytest.mark.parametrize("name", KEPT)
def test_earlier_checkpoints_stay_intact_after_a_failed_write(
    outcomes: list[Any], name: str
) -> None:
    """No file of a failed save remains in the directory of a cell."""
    model = outcomes[1] / name / "adam"
    saved = sorted(path.with_suffix("") for path in model.glob("model.ckpt-*.index"))
    assert saved
    assert all(map(is_intact, map(str, saved)))
    left = [p.name for p in model.iterdir() if "temp" in p.name or p.name.endswith(".tmp")]
    assert not left
