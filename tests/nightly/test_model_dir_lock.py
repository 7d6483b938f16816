"""The lock of model_dir: refused runs, lost locks, and evaluators that watch the chief."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from harness import Process, run_python
from locked_dirs import data, estimator_in, wait
from ranks import Ranks
from rings import Spawn
from session_hooks import AfterStep
from statuses import Holder

import estimator_ext
import hostopt
from estimator_ext.checkpoints import model_dir_lock
from estimator_ext.checkpoints.model_dir_lock import is_training, training_in
from estimator_ext.evaluation.evaluation import ChiefLiveness
from hostopt import lock_file
from hostopt.collectives import hosts

estimator_ext.install()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Process]:
    """A process that holds the lock of tmp_path."""
    with Holder(tmp_path, []) as holder:
        yield holder.process


def test_a_second_run_is_refused_on_all_ranks_and_the_first_continues(
    tmp_path: Path, ranks: Ranks
) -> None:
    model = tmp_path / "model" / "adam"
    result = []

    def start_another() -> None:
        before = sorted(path.name for path in model.rglob("*"))
        settings = {"model_dir": str(tmp_path / "model"), "optimizers": ["adam"]}
        result.extend(ranks.run("train.py", 2, codes=[78], arguments=[json.dumps(settings)]))
        assert sorted(path.name for path in model.rglob("*")) == before

    assert not is_training(str(model))
    estimator_in(model).train(data, [AfterStep(1, lambda _: start_another())], max_steps=3)
    in_use = f"ConfigError: model_dir {model.resolve()} is in use: process {os.getpid()} on"
    cure = "Wait until it has ended, or end it, or give this run another model_dir"
    for rank in result:
        assert in_use in rank.output
        assert cure in rank.output
    assert len(result) == 2
    assert tf.train.load_variable(str(model), "global_step") == 3
    assert not is_training(str(model))


def test_a_run_that_lost_its_model_dir_saves_nothing_there(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def start_over() -> None:
        for path in tmp_path.iterdir():
            path.unlink()
        request.getfixturevalue("holder")

    with pytest.raises(hostopt.ConfigError, match=r"is in use: process \d+ on host .* trains"):
        estimator_in(tmp_path).train(data, [AfterStep(1, lambda _: start_over())], max_steps=3)
    assert not list(tmp_path.glob("*ckpt*"))


@pytest.mark.parametrize("distributed", [True, False])
def test_a_single_process_is_refused(tmp_path: Path, holder: Any, distributed: bool) -> None:
    with pytest.raises(hostopt.ConfigError, match=rf"in use: process {holder.pid} on host "):
        estimator_in(tmp_path, distributed).train(data, steps=1)
    assert [path.name for path in tmp_path.iterdir()] == ["hostopt-training.lock"]
    holder.kill()
    holder.wait()
    estimator_in(tmp_path, distributed).train(data, steps=1)  # without waiting


ALONE = """
import sys
import estimator_ext
estimator_ext.install()
estimator_ext.Estimator(lambda features, labels: None, sys.argv[1]).train(print, steps=1)
"""


def test_a_program_without_a_strategy_exits_with_the_code_of_the_error(
    tmp_path: Path, holder: Any
) -> None:
    result = run_python("-c", ALONE, tmp_path, code=78, limit_s=60)
    assert f"in use: process {holder.pid} on host " in result.stderr


def test_a_refused_run_leaves_model_dir_unchanged(
    tmp_path: Path, ranks: Ranks, holder: Any
) -> None:
    (tmp_path / "hostopt-training-ended.json").write_text("{}")
    before = {path.name for path in tmp_path.iterdir()}
    settings = json.dumps({"model_dir": str(tmp_path), "images": 300, "metric": "accuracy"})
    started = ranks.run("evaluate.py", 2, codes=[78], arguments=[settings])
    for rank in started:
        assert f"ConfigError: model_dir {tmp_path.resolve()} is in use: pro" in rank.output
    after = {path.name for path in tmp_path.iterdir()} - {rank.log.name for rank in started}
    assert after == before


@pytest.mark.parametrize("other", [(lock_file.socket, "gethostname"), (hosts, "boot_id")])
def test_ranks_wait_for_a_lock_holder_on_another_host(
    spawn_inproc: Spawn,
    tmp_path: Path,
    holder: Any,
    monkeypatch: pytest.MonkeyPatch,
    other: tuple[Any, str],
) -> None:
    monkeypatch.setattr(*other, lambda: "another")
    warned = []

    def end_holder(*text: object) -> None:
        warned.append(text)
        holder.kill()
        holder.wait()

    monkeypatch.setattr(model_dir_lock._log, "warning", end_holder)

    def run(communicator: hostopt.Communicator) -> bool:
        with training_in(str(tmp_path), communicator):
            result = is_training(str(tmp_path))
            communicator.barrier()
        return result

    assert spawn_inproc(2, run) == [True, True]
    assert len(warned) == 1 and "is locked by process" in warned[0][1]
    assert not is_training(str(tmp_path))


def test_the_wait_for_a_live_host_is_limited(
    tmp_path: Path, holder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_file.socket, "gethostname", lambda: "another host")
    monkeypatch.setattr(model_dir_lock, "_LEASE_S", 0.6)
    with pytest.raises(hostopt.ConfigError, match="is in use"), training_in(str(tmp_path)):
        pass


def test_a_lock_whose_holder_has_not_written_its_name(tmp_path: Path, holder: Any) -> None:
    (tmp_path / "hostopt-training.lock").write_text("")
    with pytest.raises(hostopt.ConfigError, match="in use: another process trains there"):
        estimator_in(tmp_path).train(data, steps=1)


# -- evaluators ----------------------------------------------------------------------------


def test_an_evaluator_whose_chief_has_vanished(tmp_path: Path, holder: Any) -> None:
    chief = ChiefLiveness(str(tmp_path), hostopt.Options(evaluator_timeout_s=60))
    wait(chief, 20)  # the chief trains
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    wait(chief, 5)
    (tmp_path / "checkpoint").touch()  # another chief has saved a checkpoint
    wait(chief, 6)
    os.utime(tmp_path / "checkpoint", ns=(1, 1))  # and another one
    wait(chief, 6)
    with pytest.raises(
        hostopt.PeerLostError, match=r"start all processes again.*raise evaluator_timeout_s"
    ):
        wait(chief, 1)
