"""Damaged checkpoints are detected and named; a failed save keeps earlier checkpoints."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from harness import deadline_s
from one_weight import model_fn

import estimator_ext
import hostopt
from estimator_ext.checkpoints import input_state_file
from estimator_ext.checkpoints import reading as checkpoint_reading
from estimator_ext.checkpoints.file_errors import absolute, cannot_save, translate_io_errors
from estimator_ext.checkpoints.reading import check, check_newest, is_intact
from estimator_ext.checkpoints.saving import checked_saver

estimator_ext.install()


STEPS = (5, 10, 15)
DATA = "data-00000-of-00001"


def save(directory: Path, steps: tuple[int, ...] = STEPS, name: str = "model.ckpt") -> None:
    """Saves checkpoints of a few variables, as Estimator does."""
    with tf.Graph().as_default():
        numbers = tf.random.stateless_uniform([300, 7], [1, 2])
        tf.compat.v1.get_variable("kernel", initializer=numbers)
        tf.compat.v1.get_variable("words", initializer=tf.constant(["a", "bc"]))
        step = tf.compat.v1.train.create_global_step()
        saver = tf.compat.v1.train.Saver(sharded=True, save_relative_paths=True)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for number in steps:
                session.run(step.assign(number))
                state = input_state_file.pack({"pipelines": [1], "parts": [1]}, [bytes(1000)])
                attributes = {"process": "another", "step": str(number)}
                input_state_file.write(str(directory / f"{name}-{number}"), attributes, [state])
                saver.save(session, str(directory / name), global_step=number)


def prefix(directory: Path, step: int = STEPS[-1]) -> str:
    return str(directory / f"model.ckpt-{step}")


def flip(path: Path, place: float = 0.5) -> None:
    """Flips one bit of a file."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 1
    path.write_bytes(content)


def cut(path: Path, length: float = 0.5) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * length)])


# file, damage, and a part of the error message
DAMAGES: list[tuple[str, Callable[[Path], Any], str]] = [
    ("model.ckpt-15.index", flip, "model.ckpt-15.index: "),
    ("model.ckpt-15.index", cut, "model.ckpt-15.index: not an sstable"),
    ("model.ckpt-15.index", lambda path: path.write_bytes(b""), "model.ckpt-15.index: "),
    ("model.ckpt-15.index", Path.unlink, "model.ckpt-15.index: "),
    (f"model.ckpt-15.{DATA}", flip, "which holds 'kernel': .*Checksum does not match"),
    (f"model.ckpt-15.{DATA}", lambda path: flip(path, 0.0), "which holds 'global_step'"),
    (f"model.ckpt-15.{DATA}", lambda path: flip(path, 0.9999), "which holds 'words'"),
    (f"model.ckpt-15.{DATA}", cut, "model.ckpt-15.data-.*, which holds 'kernel'"),
    (f"model.ckpt-15.{DATA}", lambda path: cut(path, 0.9999), "which holds 'words'"),
    (f"model.ckpt-15.{DATA}", Path.unlink, "No such file"),
    ("model.ckpt-15.input", flip, "model.ckpt-15.input, .* is damaged: its checksum"),
    ("model.ckpt-15.input", cut, "model.ckpt-15.input, .* is damaged"),
    ("checkpoint", lambda path: path.write_text(""), "checkpoint is empty or damaged"),
    ("checkpoint", lambda path: path.write_text("garbage"), "checkpoint is empty or damaged"),
    ("checkpoint", cut, "checkpoint"),
]
IDS = [f"{number}-{file}" for number, (file, _, _) in enumerate(DAMAGES)]


@pytest.mark.parametrize(("file", "damage", "message"), DAMAGES, ids=IDS)
def test_damage_is_reported_with_the_newest_intact_checkpoint(
    tmp_path: Path, file: str, damage: Callable[[Path], Any], message: str
) -> None:
    save(tmp_path)
    check_newest(str(tmp_path), restore_previous=False)
    damage(tmp_path / file)
    intact = prefix(tmp_path, 15 if file == "checkpoint" else 10)
    with pytest.raises(hostopt.CheckpointError, match=message) as caught:
        check_newest(str(tmp_path), restore_previous=False)
    assert file.partition(DATA)[0] in str(caught.value)
    assert intact in str(caught.value)
    assert "HOSTOPT_RESTORE_PREVIOUS" in str(caught.value)
    assert caught.value.last_checkpoint == intact


@pytest.mark.parametrize(("file", "damage", "message"), DAMAGES, ids=IDS)
def test_training_resumes_from_the_newest_intact_checkpoint(
    tmp_path: Path, file: str, damage: Callable[[Path], Any], message: str
) -> None:
    save(tmp_path)
    damage(tmp_path / file)
    before = {path.name for path in tmp_path.iterdir()}
    check_newest(str(tmp_path), restore_previous=True)
    intact = 15 if file == "checkpoint" else 10
    state = tf.train.get_checkpoint_state(str(tmp_path))
    assert state.model_checkpoint_path == prefix(tmp_path, intact)
    # so that keep_checkpoint_max counts earlier checkpoints
    kept = [prefix(tmp_path, step) for step in STEPS if step <= intact]
    assert list(state.all_model_checkpoint_paths) == kept
    assert tf.train.load_variable(str(tmp_path), "global_step") == intact
    assert {path.name for path in tmp_path.iterdir()} == before
    check_newest(str(tmp_path), restore_previous=False)


@pytest.mark.parametrize("also", [None, f"model.ckpt-15.{DATA}"])
@pytest.mark.parametrize("restore_previous", [False, True])
def test_a_state_of_a_later_release_is_not_passed_over(
    tmp_path: Path, restore_previous: bool, also: str | None
) -> None:
    save(tmp_path)
    for step in STEPS[1:]:
        path = tmp_path / f"model.ckpt-{step}.input"
        path.write_bytes(path.read_bytes().replace(b"hostopt input 2", b"hostopt input 3"))
    if also:
        cut(tmp_path / also)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(hostopt.CheckpointError, match=r"has format 3.* Resume with the release"):
        check_newest(str(tmp_path), restore_previous)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("restore_previous", [False, True])
def test_damage_is_named_beside_the_format_of_an_earlier_checkpoint(
    tmp_path: Path, restore_previous: bool
) -> None:
    save(tmp_path)
    cut(tmp_path / f"model.ckpt-15.{DATA}")
    path = tmp_path / "model.ckpt-10.input"
    path.write_bytes(path.read_bytes().replace(b"hostopt input 2", b"hostopt input 1"))
    wanted = rf"cannot read \S+ckpt-15\.{DATA[:4]}.*ckpt-10\.input, .* has format 1"
    with pytest.raises(hostopt.CheckpointError, match=wanted):
        check_newest(str(tmp_path), restore_previous)


def test_a_state_of_another_release_elsewhere_is_not_passed_over(tmp_path: Path) -> None:
    save(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    for path in tmp_path.glob("model.ckpt-15.*"):
        path.rename(other / path.name)
    path = other / "model.ckpt-15.input"
    path.write_bytes(path.read_bytes().replace(b"hostopt input 2", b"hostopt input 3"))
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "other/model.ckpt-15"\n')
    with pytest.raises(hostopt.CheckpointError, match=r"has format 3.* Resume with the release"):
        check_newest(str(tmp_path), restore_previous=True)


def test_ranks_wait_while_rank_0_reads_the_newest_checkpoint(
    spawn_grpc: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeout_s = deadline_s(1.0)
    has_waited = threading.Event()

    def check_slowly(model_dir: str, restore_previous: bool) -> None:
        assert has_waited.wait(10 * timeout_s)
        raise hostopt.CheckpointError("it is damaged")

    monkeypatch.setattr(checkpoint_reading, "check_newest", check_slowly)

    def check_and_return_error(communicator: hostopt.Communicator) -> str:
        if communicator.rank == 1:
            threading.Timer(1.5 * timeout_s, has_waited.set).start()
        try:
            checkpoint_reading.check_on_rank_0(communicator, str(tmp_path), restore_previous=False)
        except hostopt.CheckpointError as error:
            return str(error)
        return "read"

    message = spawn_grpc(2, check_and_return_error, collective_timeout_s=timeout_s)
    assert message == ["it is damaged", "read"]


def test_several_damaged_checkpoints_are_skipped(tmp_path: Path) -> None:
    save(tmp_path)
    flip(tmp_path / f"model.ckpt-15.{DATA}")
    cut(tmp_path / "model.ckpt-10.index")
    check_newest(str(tmp_path), restore_previous=True)
    assert tf.train.latest_checkpoint(str(tmp_path)) == prefix(tmp_path, 5)


def save_averages(directory: Path, step: int) -> None:
    """Saves a checkpoint with a saver of the user, from which no training can resume."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        average = tf.compat.v1.get_variable("average", initializer=1.0)
        session.run(average.initializer)
        saver = tf.compat.v1.train.Saver()
        saver.save(session, str(directory / "ema"), step, latest_filename="of_averages")


def test_checkpoints_of_other_savers_are_ignored(tmp_path: Path) -> None:
    save(tmp_path, (10, 20), "other")  # also of a model
    save(tmp_path, (5, 15))
    save_averages(tmp_path, 14)
    flip(tmp_path / f"model.ckpt-15.{DATA}")
    check_newest(str(tmp_path), restore_previous=True)
    assert tf.train.latest_checkpoint(str(tmp_path)) == prefix(tmp_path, 5)


def test_with_an_empty_checkpoint_file_the_newest_checkpoint_has_a_global_step(
    tmp_path: Path,
) -> None:
    save(tmp_path)
    save_averages(tmp_path, 20)
    (tmp_path / "checkpoint").write_text("")
    check_newest(str(tmp_path), restore_previous=True)
    assert tf.train.latest_checkpoint(str(tmp_path)) == prefix(tmp_path)


def test_training_does_not_start_over_without_an_intact_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, (5,))
    flip(tmp_path / f"model.ckpt-5.{DATA}")
    with pytest.raises(hostopt.CheckpointError, match="No other checkpoint in "):
        check_newest(str(tmp_path), restore_previous=True)


def test_training_of_one_step_does_not_start_over_without_the_checkpoint_file(
    tmp_path: Path,
) -> None:
    save(tmp_path, (0, 1))
    (tmp_path / "checkpoint").unlink()
    with pytest.raises(hostopt.CheckpointError, match=r"no file .*, but model.ckpt-1\."):
        check_newest(str(tmp_path), restore_previous=False)


def test_training_does_not_start_over_if_the_checkpoint_file_is_deleted(tmp_path: Path) -> None:
    save(tmp_path, (5, 10, 15, 20, 25))
    save_averages(tmp_path, 30)
    (tmp_path / "checkpoint").unlink()
    message = (
        f"{tmp_path} has no file `checkpoint`, which names the checkpoint to resume from, but "
        "model.ckpt-25, model.ckpt-20, model.ckpt-15 and 2 more. The newest intact checkpoint is "
        f"{prefix(tmp_path, 25)}: to resume from it, use `hostopt run --restore-previous`"
    )
    with pytest.raises(hostopt.CheckpointError) as error:
        check_newest(str(tmp_path), restore_previous=False)
    assert str(error.value).startswith(message)
    assert str(error.value).endswith("to start over, give another model_dir, or empty this one")
    check_newest(str(tmp_path), restore_previous=True)
    assert tf.train.latest_checkpoint(str(tmp_path)) == prefix(tmp_path, 25)


def test_training_starts_if_nothing_was_trained(tmp_path: Path) -> None:
    """The training was killed during its first save; checkpoints of other savers exist."""
    save(tmp_path, (0,))
    (tmp_path / "checkpoint").unlink()
    save_averages(tmp_path, 20)
    check_newest(str(tmp_path), restore_previous=False)


def test_damaged_checkpoints_without_a_checkpoint_file_are_named(tmp_path: Path) -> None:
    save(tmp_path, (5,))
    (tmp_path / "checkpoint").unlink()
    flip(tmp_path / "model.ckpt-5.index")
    with pytest.raises(hostopt.CheckpointError, match=r"but model\.ckpt-5\. No other checkpoint"):
        check_newest(str(tmp_path), restore_previous=True)


def test_training_starts_in_an_empty_or_missing_model_dir(tmp_path: Path) -> None:
    check_newest(str(tmp_path), restore_previous=False)
    check_newest(str(tmp_path / "none"), restore_previous=False)


def test_each_flipped_bit_that_changes_a_value_is_detected(tmp_path: Path) -> None:
    """The index has several blocks, each with a checksum."""
    path = str(tmp_path / "many-1")
    names = [
        f"a/rather/long/name/of/a/variable/in/some/deeply/nested/scope/{i}" for i in range(5000)
    ]
    values = [tf.constant(float(i)) for i in range(5000)]
    tf.raw_ops.SaveV2(
        prefix=path, tensor_names=names, shape_and_slices=[""] * 5000, tensors=values
    )
    check(path)
    index = tmp_path / "many-1.index"
    good = index.read_bytes()
    for place in np.linspace(0.0, 0.99, 40):
        flip(index, place)
        assert not is_intact(path), f"at {place} of {len(good)} bytes"
        index.write_bytes(good)
    check(path)


def test_slots_of_single_partitions_are_no_damage(tmp_path: Path) -> None:
    """TensorFlow saves them as incomplete variables if the optimizer is in a variable scope."""
    path = str(tmp_path / "model.ckpt-1")
    tf.raw_ops.SaveV2(
        prefix=path,
        tensor_names=["kernel/t_1/Adagrad"],
        shape_and_slices=["4 2,2"],  # elements 2 and 3 of 4
        tensors=[tf.constant([1.0, 2.0])],
    )
    check(path)


def test_a_checkpoint_of_objects_without_a_step_is_refused(tmp_path: Path) -> None:
    path = tf.train.Checkpoint(kernel=tf.Variable(1.0)).save(str(tmp_path / "model.ckpt"))
    with pytest.raises(hostopt.CheckpointError, match="has no global_step, so training"):
        checkpoint_reading.read_step(path)


# -- writing -------------------------------------------------------------------------------


class FailingSaver:
    """Saver that writes an incomplete checkpoint, as on a full disk."""

    saver_def = "what else a saver has"

    def __init__(self, directory: Path, names: list[str]) -> None:
        self._files = [directory / name for name in names]

    def save(self, session: Any, path: str, global_step: int) -> None:
        for file in self._files:
            file.parent.mkdir(exist_ok=True)
            file.write_text("half")
        # sessions of TensorFlow treat this error as the end of the data
        raise tf.errors.OutOfRangeError(None, None, f"{path}-{global_step}; File too large\n\t[[")


def failed_save(directory: Path, step: int, names: list[str]) -> hostopt.CheckpointError:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.get_variable("kernel", [1000, 500])
        hook = tf.compat.v1.train.CheckpointSaverHook(
            str(directory), save_steps=1, saver=FailingSaver(directory, names)
        )
        with checked_saver(hook, None), pytest.raises(hostopt.CheckpointError) as caught:
            assert hook._get_saver().saver_def == FailingSaver.saver_def
            hook._get_saver().save(session, str(directory / "model.ckpt"), global_step=step)
        return caught.value


def test_a_failed_save_is_reported_and_keeps_existing_files(tmp_path: Path) -> None:
    save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    error = failed_save(
        tmp_path,
        150,
        [
            "model.ckpt-150_temp/part-00000-of-00001.data-00000-of-00001",
            f"model.ckpt-150.{DATA}",
            f"model.ckpt-150.{DATA}.tempstate123",
            "model.ckpt-150.meta",
        ],
    )
    assert f"cannot save {prefix(tmp_path, 150)}: " in str(error)
    assert "File too large (2.0 MB are needed, " in str(error)
    assert error.last_checkpoint == prefix(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_newest_checkpoint_is_kept_if_saving_it_again_fails(tmp_path: Path) -> None:
    save(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    failed_save(tmp_path, 15, ["model.ckpt-15_temp/part-00000-of-00001"])
    assert {path.name for path in tmp_path.iterdir()} == before
    check(prefix(tmp_path))


def test_an_earlier_checkpoint_of_the_step_is_kept_while_it_is_intact(tmp_path: Path) -> None:
    """A training that resumed from an older checkpoint reaches the step again."""
    save(tmp_path, (5, 10))
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-5"\n')
    before = {path.name for path in tmp_path.iterdir()}
    failed_save(tmp_path, 10, ["model.ckpt-10_temp/part-00000-of-00001"])
    assert {path.name for path in tmp_path.iterdir()} == before
    failed_save(tmp_path, 10, [f"model.ckpt-10.{DATA}"])  # no longer intact
    assert not list(tmp_path.glob("model.ckpt-10*"))
    check(prefix(tmp_path, 5))


def test_a_directory_with_the_name_of_a_file_is_kept(tmp_path: Path) -> None:
    save(tmp_path)
    failed_save(tmp_path, 20, [f"model.ckpt-20.{DATA}/notes"])
    assert (tmp_path / f"model.ckpt-20.{DATA}" / "notes").exists()


def test_other_files_that_cannot_be_written_are_reported(tmp_path: Path) -> None:
    (tmp_path / "plugins").write_text("no directory")
    expected = pytest.raises(hostopt.CheckpointError, match="cannot write or read a file of ")
    with expected, translate_io_errors(str(tmp_path)):
        tf.io.gfile.makedirs(str(tmp_path / "plugins" / "profile"))
    with pytest.raises(tf.errors.NotFoundError), translate_io_errors(str(tmp_path)):
        tf.io.gfile.GFile(str(tmp_path / "vocabulary")).read()


@pytest.mark.parametrize(
    ("text", "is_of_model_dir"),
    [
        ("out/plugins; Not a directory", True),
        ("out; Permission denied", True),
        ("cannot write 'out/model'", True),
        ("out is not a directory", True),
        ("ran out of time", False),
        ("/other/out/file; Permission denied", False),
        ("output/file; Permission denied", False),
    ],
)
def test_errors_of_files_outside_model_dir_are_unchanged(text: str, is_of_model_dir: bool) -> None:
    expected = hostopt.CheckpointError if is_of_model_dir else tf.errors.PermissionDeniedError
    with pytest.raises(expected), translate_io_errors("out"):
        raise tf.errors.PermissionDeniedError(None, None, text)


@pytest.mark.parametrize(
    ("path", "remedy"),
    [("/model/c-5", "Free disk space, or allow"), ("s3://model/c-5", "Check its quota and its")],
)
def test_the_remedy_is_that_of_the_file_system(path: str, remedy: str) -> None:
    error = tf.errors.PermissionDeniedError(None, None, "denied")
    assert f". {remedy}" in str(cannot_save(path, error, 1))
    assert absolute(path) == path  # no directory of this machine is put before a URL


# -- resumed trainings ---------------------------------------------------------------------


class Listener(tf.compat.v1.train.CheckpointSaverListener):
    """Records the steps whose checkpoints were saved."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def after_save(self, session: Any, global_step_value: int) -> None:
        self.steps.append(int(global_step_value))


def test_a_restored_checkpoint_is_not_written_again(tmp_path: Path) -> None:
    """The same hook is used by several trainings."""
    listener = Listener()
    hook = tf.compat.v1.train.CheckpointSaverHook(
        str(tmp_path), save_steps=3, listeners=[listener]
    )

    def data() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(([[1.0]], [[1.0]])).repeat()

    def files(step: int) -> dict[str, tuple[int, int]]:
        result = [p for p in tmp_path.glob(f"model.ckpt-{step}.*") if p.suffix != ".input"]
        return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in result}

    def train(max_steps: int) -> None:
        with contextlib.closing(estimator_ext.HostOffloadStrategy()) as strategy:
            config = estimator_ext.RunConfig(train_distribute=strategy)
            estimator = estimator_ext.Estimator(model_fn, str(tmp_path), config)
            estimator.train(data, hooks=[hook], max_steps=max_steps)

    train(5)
    saved = files(5)
    assert {"model.ckpt-5.index", "model.ckpt-5.meta"} < set(saved)
    assert listener.steps == [0, 3, 5]
    train(7)
    assert files(5) == saved
    assert listener.steps == [0, 3, 5, 5, 7]
    assert tf.train.latest_checkpoint(str(tmp_path)) == prefix(tmp_path, 7)
    assert int(tf.train.load_variable(str(tmp_path), "global_step")) == 7


def test_a_model_with_other_shapes_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    """TensorFlow restores it without an error, and trains with the shapes of the checkpoint."""

    def data() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(([[1.0]], [[1.0]])).repeat()

    def train(units: int) -> None:
        def wide_model_fn(features: tf.Tensor, labels: tf.Tensor, mode: str) -> Any:
            kernel = tf.compat.v1.get_variable("kernel", [1, units])
            loss = tf.reduce_mean(tf.square(tf.matmul(features, kernel) - labels))
            optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
            train_op = optimizer.minimize(loss, tf.compat.v1.train.get_global_step())
            return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

        with contextlib.closing(estimator_ext.HostOffloadStrategy()) as strategy:
            config = estimator_ext.RunConfig(train_distribute=strategy)
            estimator = estimator_ext.Estimator(wide_model_fn, str(tmp_path), config)
            estimator.train(data, steps=1)

    train(3)
    message = r"ckpt-1 has 'kernel' of shape \[1, 3\], the model has it of shape \[1, 4\]\. Give"
    with pytest.raises(hostopt.CheckpointError, match=message):
        train(4)
    train(3)
    assert int(tf.train.load_variable(str(tmp_path), "global_step")) == 2
