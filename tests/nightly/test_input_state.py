"""Saved input states: a later process continues reading at the saved position."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf
from input_states import (
    Pipeline,
    another_process,
    fresh,
    resumed,
    save_and_continue,
    shuffled,
    through_python,
    train,
)
from rings import Spawn

import estimator_ext

estimator_ext.install()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("pipelines", [[shuffled], [shuffled, through_python]])
def test_another_process_continues_reading(
    spawn_inproc: Spawn,
    tmp_path: Path,
    size: int,
    pipelines: list[Pipeline],
) -> None:
    path = str(tmp_path / "model.ckpt-7")
    expected = spawn_inproc(size, lambda c: save_and_continue(c, path, *pipelines))
    another_process()
    assert spawn_inproc(size, lambda c: resumed(c, path, *pipelines)) == expected
    assert len({str(batches) for batches in expected}) == size  # each rank has a different shard


@pytest.mark.parametrize(
    ("size", "pipeline", "message"),
    [
        (2, shuffled, "was saved by 3 ranks, and now there are 2"),
        (3, lambda *rank: shuffled(*rank, offset=1), "another pipeline"),
        (3, lambda *rank: shuffled(*rank).map(lambda x: x), "another pipeline"),
    ],
)
def test_changed_data_start_over_with_a_warning(
    spawn_inproc: Spawn,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    size: int,
    pipeline: Pipeline,
    message: str,
) -> None:
    path = str(tmp_path / "model.ckpt-7")
    spawn_inproc(3, lambda c: save_and_continue(c, path, shuffled))
    another_process()
    start = spawn_inproc(size, lambda c: fresh(c, pipeline))
    assert spawn_inproc(size, lambda c: resumed(c, path, pipeline)) == start
    assert message in caplog.text


@pytest.mark.parametrize("by_hook", [False, True], ids=["dataset", "initialised by a hook"])
def test_an_estimator_of_another_process_resumes(tmp_path: Path, by_hook: bool) -> None:
    def dataset() -> tf.data.Dataset:
        return tf.data.Dataset.range(100).batch(2)

    assert train(tmp_path, dataset, 3, by_hook) == [[0, 1], [2, 3], [4, 5]]
    another_process()
    assert train(tmp_path, dataset, 2, by_hook) == [[6, 7], [8, 9]]
