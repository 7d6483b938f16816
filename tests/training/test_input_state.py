"""Saved input states: a later process continues reading at the saved position."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from input_states import (
    BATCH,
    EXAMPLES,
    Pipeline,
    Reader,
    another_process,
    fresh,
    resumed,
    save_and_continue,
    shuffled,
    through_python,
    train,
    v1,
)
from rings import Spawn

import estimator_ext
import hostopt
from estimator_ext.checkpoints import input_state_file
from estimator_ext.input import positions
from estimator_ext.input import state as input_state

estimator_ext.install()


def test_a_child_of_fork_is_another_process() -> None:
    identifiers = {input_state._identifier(pid) for pid in (100, 101, 100)}
    assert len(identifiers) == 2


def from_generator(size: int, rank: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(lambda: iter(range(EXAMPLES)), tf.int64).batch(BATCH)


def test_the_same_process_reads_from_the_start(spawn_inproc: Spawn, tmp_path: Path) -> None:
    path = str(tmp_path / "model.ckpt-7")
    spawn_inproc(1, lambda c: save_and_continue(c, path, shuffled))
    (result,) = spawn_inproc(1, lambda c: resumed(c, path, shuffled))
    (start,) = spawn_inproc(1, lambda c: fresh(c, shuffled))
    assert result == start


@pytest.mark.parametrize("by_guard", [True, False], ids=["by the guard", "by the last step"])
def test_exhausted_data_start_over(spawn_inproc: Spawn, tmp_path: Path, by_guard: bool) -> None:
    path = str(tmp_path / "model.ckpt-7")

    def short(size: int, rank: int) -> tf.data.Dataset:
        return shuffled(size, rank).take(20)

    def end(communicator: hostopt.Communicator) -> None:
        reader = Reader(communicator, short).begin(None)
        reader.read(20)
        reader.data_have_ended = by_guard
        reader.save(path)

    spawn_inproc(2, end)
    another_process()
    start = spawn_inproc(2, lambda c: fresh(c, short))
    assert spawn_inproc(2, lambda c: resumed(c, path, short)) == start


def test_data_exhausted_on_one_rank_remain_exhausted(spawn_inproc: Spawn, tmp_path: Path) -> None:
    path = str(tmp_path / "model.ckpt-7")

    def uneven(size: int, rank: int) -> tf.data.Dataset:
        return shuffled(size, rank).take(27 if rank else 7)

    def save(communicator: hostopt.Communicator) -> list[Any]:
        reader = Reader(communicator, uneven).begin(None)
        reader.read(7)
        reader.save(path)
        return reader.read(20) if communicator.rank else []

    def resume(communicator: hostopt.Communicator) -> list[Any]:
        reader = Reader(communicator, uneven).begin(None if communicator.rank else path)
        if communicator.rank:
            return reader.read(20)
        with pytest.raises(tf.errors.OutOfRangeError):
            reader.read(1)
        return []

    expected = spawn_inproc(2, save)
    another_process()
    assert spawn_inproc(2, resume) == expected


def test_a_checkpoint_without_states_is_named(
    spawn_inproc: Spawn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (0, 7):
        path = str(tmp_path / f"model.ckpt-{step}")
        assert spawn_inproc(1, lambda c, p=path: resumed(c, p, shuffled)) == spawn_inproc(
            1, lambda c: fresh(c, shuffled)
        )
    assert "ckpt-7 was saved without their state" in caplog.text
    assert "ckpt-0" not in caplog.text


def test_a_state_that_is_too_large_is_skipped_and_named(
    spawn_inproc: Spawn,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def large(size: int, rank: int) -> tf.data.Dataset:
        noise = tf.random.stateless_uniform([1 << 17], [1, 2])  # half a MiB for each example
        return tf.data.Dataset.range(9).map(lambda x: noise + tf.cast(x, tf.float32)).cache()

    monkeypatch.setattr(positions, "MAX_BYTES", 2 << 20)
    path = str(tmp_path / "model.ckpt-7")

    def save(communicator: hostopt.Communicator, pipeline: Pipeline) -> None:
        reader = Reader(communicator, pipeline).begin(None)
        for _ in range(2):
            reader.read(4)
            reader.save(path)

    spawn_inproc(
        1, lambda c: save(c, lambda *rank: large(*rank).take(0).concatenate(large(*rank)))
    )
    assert caplog.text.count("their state takes more than 2 MiB") == 1
    assert Path(f"{path}.input").stat().st_size < 1000


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        (from_generator, "rank 0: its data cannot be saved .* GeneratorDataset"),
        (
            through_python,
            "rank 0: .* resume at the saved position, without .* a function .* PyFunc",
        ),
        (
            lambda *rank: shuffled(*rank).map(lambda x: x + tf.random.uniform([], 0, 9, tf.int64)),
            "without .* such as random numbers: RandomUniformInt is stateful",
        ),
    ],
)
def test_data_that_cannot_be_saved_are_named(
    spawn_inproc: Spawn,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    pipeline: Pipeline,
    said: str,
) -> None:
    caplog.set_level("INFO", "tensorflow")
    path = str(tmp_path / "model.ckpt-7")

    def save(communicator: hostopt.Communicator) -> None:
        reader = Reader(communicator, pipeline).begin(None)
        for _ in range(3):
            reader.read(1)
            reader.save(path)

    spawn_inproc(1, save)
    (message,) = (text for text in caplog.messages if text.startswith("rank 0"))
    assert re.search(said, message)


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_file_is_named(spawn_inproc: Spawn, tmp_path: Path, damage: str) -> None:
    path = str(tmp_path / "model.ckpt-7")
    spawn_inproc(1, lambda c: save_and_continue(c, path, shuffled))
    file = Path(f"{path}.input")
    data = bytearray(file.read_bytes())
    input_state_file.read(path)
    data[len(data) // 3] ^= 1
    file.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    with pytest.raises(hostopt.CheckpointError, match=r"ckpt-7\.input, .* is damaged"):
        input_state_file.read(path)


def test_a_file_of_another_step_is_named(spawn_inproc: Spawn, tmp_path: Path) -> None:
    path = str(tmp_path / "model.ckpt-7")
    spawn_inproc(1, lambda c: save_and_continue(c, path, shuffled))
    Path(f"{path}.input").rename(tmp_path / "model.ckpt-8.input")
    with pytest.raises(hostopt.CheckpointError, match=r"not those of this checkpoint\. Remove it"):
        input_state_file.read(str(tmp_path / "model.ckpt-8"))


@pytest.mark.parametrize("number", [1, 3, 10])
@pytest.mark.parametrize("length", [60, None], ids=["cut", "whole"])
def test_a_file_of_another_release_is_named(
    tmp_path: Path, number: int, length: int | None
) -> None:
    path = str(tmp_path / "model.ckpt-7")
    input_state_file.write(path, {"process": "another", "step": "7"}, [b""])
    file = Path(f"{path}.input")
    content = file.read_bytes().replace(b"input 2", b"input %d" % number)
    file.write_bytes(content[:length])
    wanted = rf"7\.input, .* has format {number}, and hostopt \S+ reads format 2\. Resume with the"
    with pytest.raises(hostopt.CheckpointError, match=wanted):
        input_state_file.read(path)
    assert file.read_bytes() == content[:length]


def test_a_file_of_another_program_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.ckpt-7.input", "w") as archive:
        archive.writestr("facts.json", "{}")
    with pytest.raises(hostopt.CheckpointError, match=r"does not begin as .*\. Remove it"):
        input_state_file.read(str(tmp_path / "model.ckpt-7"))


def test_a_file_longer_than_its_header_states_is_not_read(tmp_path: Path) -> None:
    path = str(tmp_path / "model.ckpt-7")
    input_state_file.write(path, {"process": "another", "step": "7"}, [b""])
    input_state_file.read(path)
    with open(f"{path}.input", "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(hostopt.CheckpointError, match=r"has 1099511627776 bytes, wanted \d+\. "):
        input_state_file.read(path)


def test_files_are_deleted_with_their_checkpoints(spawn_inproc: Spawn, tmp_path: Path) -> None:
    def save(communicator: hostopt.Communicator) -> None:
        reader = Reader(communicator, shuffled).begin(None)
        for step in (1, 2, 3):
            reader.save(str(tmp_path / f"model.ckpt-{step}"))
            (tmp_path / f"model.ckpt-{step}.index").touch()
            if step == 2:
                (tmp_path / "model.ckpt-1.index").unlink()

    spawn_inproc(1, save)
    result = {path.name for path in tmp_path.glob("*.input")}
    assert result == {"model.ckpt-2.input", "model.ckpt-3.input"}
    assert not list(tmp_path.glob("*.tmp"))


def test_random_numbers_of_a_model_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tensorflow")
    with tf.Graph().as_default() as graph:
        noise = tf.random.normal([3])
        data = set(graph.get_operations())
        kernel = v1.get_variable("kernel", initializer=tf.random.uniform([3]))
        input_state.log_random_operations(kernel * noise, data)
        assert not caplog.messages
        input_state.log_random_operations(tf.nn.dropout(kernel * noise, 0.5), data)
    assert "dropout" in caplog.text
    assert "kernel" not in caplog.text


def test_an_estimator_whose_steps_end_with_the_data_starts_over(tmp_path: Path) -> None:
    for _ in range(2):
        batches = train(tmp_path, lambda: tf.data.Dataset.range(6).batch(2), 3, False)
        assert batches == [[0, 1], [2, 3], [4, 5]]
        another_process()
