"""The lock of model_dir: refused runs, lost locks, and evaluators that watch the chief."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import shutil
from pathlib import Path

import pytest
import tensorflow as tf
from locked_dirs import data, estimator_in, wait
from session_hooks import AfterStep

import estimator_ext
import hostopt
from estimator_ext.checkpoints.model_dir_lock import (
    is_training,
    training_in,
    training_without_ring,
)
from estimator_ext.evaluation.evaluation import ChiefLiveness

estimator_ext.install()


def test_a_process_may_train_and_evaluate_in_its_locked_directory(tmp_path: Path) -> None:
    def train_and_evaluate_inside() -> None:
        assert is_training(str(tmp_path))
        estimator_in(tmp_path, distributed=False).train(data, steps=1)
        assert is_training(str(tmp_path))
        measured = estimator_in(tmp_path).evaluate(data, steps=1)
        assert measured["global_step"] == 1

    for steps in (2, 4):
        hooks = [AfterStep(1, lambda _: train_and_evaluate_inside())] if steps == 2 else []
        estimator_in(tmp_path).train(data, hooks, max_steps=steps)
        assert not is_training(str(tmp_path))


@pytest.mark.parametrize("emptied", [False, True])
def test_a_run_whose_model_dir_is_deleted(tmp_path: Path, emptied: bool) -> None:
    def delete() -> None:
        shutil.rmtree(tmp_path / "model")
        if emptied:
            (tmp_path / "model").mkdir()

    refused = pytest.raises(hostopt.CheckpointError, match=r"cannot save .*No su")
    with contextlib.nullcontext() if emptied else refused:
        estimator_in(tmp_path / "model").train(
            data, [AfterStep(1, lambda _: delete())], max_steps=3
        )
    assert (tmp_path / "model" / "model.ckpt-3.index").exists() == emptied


@pytest.mark.parametrize("distributed", [True, False])
def test_one_process_holds_the_lock_between_trainings(tmp_path: Path, distributed: bool) -> None:
    observed = []

    class Look(tf.estimator.SessionRunHook):
        def end(self, session: object) -> None:
            observed.append(is_training(str(tmp_path)))

    estimator_ext.train_and_evaluate(
        estimator_in(tmp_path, distributed),
        tf.estimator.TrainSpec(data, max_steps=2),
        tf.estimator.EvalSpec(data, steps=1, hooks=[Look()]),
    )
    assert observed and all(observed)
    assert not is_training(str(tmp_path))


@pytest.mark.parametrize(
    ("job", "index", "locks"),
    [("worker", 0, True), ("worker", 1, False), ("evaluator", 0, False)],
)
def test_only_the_chief_locks_under_a_strategy_of_tensorflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, index: int, locks: bool
) -> None:
    """TensorFlow's own RunConfig says of each of these tasks that it is the chief."""
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"], "evaluator": ["127.0.0.1:3"]}
    task = {"type": job, "index": index}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    config = estimator_ext.RunConfig(train_distribute=tf.distribute.OneDeviceStrategy("/cpu:0"))
    assert config.is_chief
    with training_without_ring(str(tmp_path), config):
        assert is_training(str(tmp_path)) == locks


def test_one_of_several_ranks_does_not_train_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = estimator_ext.RunConfig()
    for jobs in ({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, {"chief": ["127.0.0.1:1"]}):
        job = next(iter(jobs))
        cluster = {"cluster": jobs, "task": {"type": job, "index": 0}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
        if job == "worker":
            with pytest.raises(hostopt.ConfigError, match="TF_CONFIG names 2 ranks"):
                training_without_ring(str(tmp_path), config)
        else:
            with training_without_ring(str(tmp_path), config):
                assert is_training(str(tmp_path))


def test_unsupported_locks_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(logging.getLogger("tensorflow"), "propagate", True)
    for model_dir in (str(tmp_path), "gs://bucket/model"):
        caplog.clear()
        for _ in range(2):
            with training_in(model_dir):
                assert not is_training(model_dir)
        (record,) = caplog.records
        assert f"cannot check if another run trains in model_dir {model_dir}" in (
            record.getMessage()
        )


def test_an_unwritable_lock_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(hostopt.CheckpointError, match=r"cannot save .*Not a dir"),
        training_in(str(tmp_path / "file" / "model")),
    ):
        pass


# -- evaluators ----------------------------------------------------------------------------


def test_an_evaluator_whose_chief_never_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("tensorflow"), "propagate", True)
    (tmp_path / "checkpoint").touch()  # from an earlier run
    chief = ChiefLiveness(str(tmp_path), hostopt.Options(evaluator_timeout_s=600))
    wait(chief, 59)
    shown = [record.getMessage() for record in caplog.records]
    assert [text.partition(" s: nobody")[0].rpartition(" ")[2] for text in shown] == [
        "30",
        "60",
        "120",
        "240",
        "480",
    ]
    with pytest.raises(hostopt.RendezvousTimeoutError, match="nothing of the chief for 600 s: no"):
        wait(chief, 1)
