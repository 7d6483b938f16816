"""Training with real processes: roles, resuming, and faults."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from harness import deadline_s, reserved_addresses
from ranks import Rank, Ranks

pytestmark = [pytest.mark.tensorflow]


def settings(tmp_path: Path, **chosen: Any) -> list[str]:
    directories = {"model_dir": str(tmp_path / "model"), "dump_dir": str(tmp_path)}
    return [json.dumps({**directories, **chosen})]


def final(tmp_path: Path, rank: int = 0, optimizer: str = "adam") -> dict[str, np.ndarray]:
    return dict(np.load(tmp_path / f"{optimizer}-{rank}.npz"))


def evaluated_steps(eval_dir: Path) -> list[int]:
    """Returns the steps for which an evaluation wrote an accuracy."""
    return [
        event.step
        for path in sorted(eval_dir.glob("events.*"))
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
        if value.tag == "acc"
    ]


def with_an_evaluator(tmp_path: Path, ranks: Ranks, chosen: dict[str, Any]) -> list[Rank]:
    """Runs chief, worker and evaluator, which must succeed."""
    with reserved_addresses(2) as (chief, worker):
        jobs = {"chief": [chief], "worker": [worker]}
        started = ranks.start(
            "train.py", jobs, evaluators=1, arguments=settings(tmp_path, **chosen)
        )
        for rank in started:
            assert rank.wait() == 0, rank.output
    return started


# -- roles ---------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["ours", "stock"])
def test_chief_worker_and_evaluator(tmp_path: Path, ranks: Ranks, api: str) -> None:
    chosen = {"optimizers": ["adam"], "api": api, "steps": 60, "checkpoint_steps": 20}
    chosen["evaluated_at"] = 20
    started = with_an_evaluator(tmp_path, ranks, chosen)
    evaluator = started[-1]
    assert "evaluated during training" in started[0].output
    assert "Saving dict for global step 60" in evaluator.output
    assert "missing" not in evaluator.output  # the evaluator does not join a ring
    model = tmp_path / "model" / "adam"
    assert evaluated_steps(model / "eval")[-1] == 60
    assert tf.train.latest_checkpoint(str(model)).endswith("model.ckpt-60")
    # a single writer of checkpoints and summaries
    assert len(list(model.glob("events.*"))) == 1
    assert "Saving checkpoints" in started[0].output
    assert "Saving checkpoints" not in started[1].output
    if api == "ours":  # the cluster does not list the evaluator
        assert "the chief evaluates the final checkpoint" in started[0].output
        assert '"global_step": 60' in started[0].output
        assert "RESULT [null, []]" in started[1].output
        # both may have evaluated in the same second: each has a separate file
        assert len({path.suffix for path in (model / "eval").glob("events.*")}) == 2
        assert '"global_step": 60' in evaluator.output


def test_an_evaluator_ends_with_a_training_that_ends_early(tmp_path: Path, ranks: Ranks) -> None:
    chosen = {"optimizers": ["adam"], "api": "ours", "steps": 1000, "batches": 30}
    started = with_an_evaluator(tmp_path, ranks, chosen)
    assert "training has ended" in started[-1].output
    assert evaluated_steps(tmp_path / "model" / "adam" / "eval")[-1] == 30


def test_a_plain_spec_with_minimize_trains_like_a_host_call(tmp_path: Path, ranks: Ranks) -> None:
    results = {}
    for spec in ("host_call", "minimize"):
        directory = tmp_path / spec
        directory.mkdir()
        chosen = {"optimizers": ["adam"], "spec": spec, "steps": 10}
        ranks.run("train.py", 2, arguments=settings(directory, **chosen))
        results[spec] = final(directory)
    assert set(results["host_call"]) == set(results["minimize"])
    for name, expected in results["host_call"].items():
        np.testing.assert_allclose(results["minimize"][name], expected, rtol=0, atol=1e-12)


def test_the_reported_loss_is_the_mean_over_the_ranks(tmp_path: Path, ranks: Ranks) -> None:
    losses = {}
    for size in (1, 2):
        directory = tmp_path / str(size)
        directory.mkdir()
        chosen = {"optimizers": ["sgd"], "steps": 5}
        ranks.run("train.py", size, arguments=settings(directory, **chosen))
        losses[size] = [final(directory, rank, "sgd")["losses"] for rank in range(size)]
    np.testing.assert_array_equal(losses[2][0], losses[2][1])
    np.testing.assert_allclose(losses[2][0], losses[1][0], rtol=0, atol=1e-12)


# -- resuming ------------------------------------------------------------------------------


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, ranks: Ranks) -> None:
    # the data repeat after 7 batches, so after 14 steps they are at the start again
    for name, stops in {"broken": [14, 20], "unbroken": [20]}.items():
        (tmp_path / name).mkdir()
        for steps in stops:
            chosen = {"optimizers": ["adam"], "steps": steps}
            ranks.run("train.py", 2, arguments=settings(tmp_path / name, **chosen))
    broken, unbroken = final(tmp_path / "broken"), final(tmp_path / "unbroken")
    assert broken["global_step"] == 20
    for name in set(unbroken) - {"losses"}:
        np.testing.assert_array_equal(broken[name], unbroken[name], err_msg=name)


def test_ranks_without_shared_files_start_from_rank_0(tmp_path: Path, ranks: Ranks) -> None:
    chosen = {"optimizers": ["adam"], "steps": 6}
    ranks.run("train.py", 1, arguments=settings(tmp_path, **chosen))
    # rank 1 has a newer checkpoint of another model, which must be ignored
    other = tmp_path / "other"
    other.mkdir()
    ranks.run("train.py", 1, arguments=settings(other, **{**chosen, "steps": 50, "hidden": 3}))
    ranks.run(
        "train.py",
        2,
        arguments=settings(tmp_path, **{**chosen, "steps": 12}),
        task_arguments={"worker:1": [json.dumps({"model_dir": str(other / "model")})]},
    )
    assert final(tmp_path, 0)["global_step"] == final(tmp_path, 1)["global_step"] == 12
    for name, value in final(tmp_path, 0).items():
        np.testing.assert_array_equal(final(tmp_path, 1)[name], value, err_msg=name)


def test_a_completed_training_ends_at_once_on_all_ranks(tmp_path: Path, ranks: Ranks) -> None:
    chosen = {"optimizers": ["adam"], "steps": 6}
    ranks.run("train.py", 1, arguments=settings(tmp_path, **chosen))
    elsewhere = json.dumps({"model_dir": str(tmp_path / "empty")})
    started = ranks.run(
        "train.py",
        2,
        arguments=settings(tmp_path, **chosen),
        task_arguments={"worker:1": [elsewhere]},
    )
    for rank in started:
        assert "step 6 is reached already" in rank.output


def test_steps_count_from_the_restored_step(tmp_path: Path, ranks: Ranks) -> None:
    chosen = {"optimizers": ["adam"], "steps": 6, "max_steps": False}
    for _ in range(2):
        ranks.run("train.py", 2, arguments=settings(tmp_path, **chosen))
    assert final(tmp_path, 0)["global_step"] == final(tmp_path, 1)["global_step"] == 12


# -- faults --------------------------------------------------------------------------------


def test_a_killed_rank_is_named_and_its_incomplete_step_is_not_saved(
    tmp_path: Path, ranks: Ranks
) -> None:
    chosen = {"optimizers": ["adam"], "steps": 1000, "checkpoint_steps": 4}
    with reserved_addresses(3) as addresses:
        started = ranks.start(
            "train.py",
            {"worker": addresses},
            arguments=settings(tmp_path, **chosen),
            task_arguments={"worker:1": [json.dumps({"stop_at": 8})]},
        )
        started[1].wait_for_output("stopped here")
        started[1].signal(signal.SIGKILL)
        for rank in (started[0], started[2]):
            assert rank.wait(10) == 200, rank.output
            assert "PeerLostError" in rank.output
            # counted from 0
            expected = (
                rf"rank 1 \(worker:1, {addresses[1]}\) lost at step 7 while rank [02] waited"
            )
            assert re.search(expected, rank.output)
            assert (
                rank.output.count("Newest intact checkpoint: step 4. Re-run the same command") == 1
            )
    model = tmp_path / "model" / "adam"
    assert tf.train.latest_checkpoint(str(model)).endswith("model.ckpt-4")
    assert not list(model.glob("model.ckpt-7*"))  # the incomplete step


def test_different_models_are_found_before_the_first_step(tmp_path: Path, ranks: Ranks) -> None:
    with reserved_addresses(2) as addresses:
        started = ranks.start(
            "train.py",
            {"worker": addresses},
            arguments=settings(tmp_path, optimizers=["adam"]),
            task_arguments={"worker:1": [json.dumps({"hidden": 9})]},
        )
        for rank in started:
            assert rank.wait() == 65, rank.output
            assert "CollectiveMismatchError" in rank.output
            assert "rank 0 has [5, 8] float64, rank 1 has [5, 9] float64" in rank.output
    assert not (tmp_path / "model" / "adam" / "checkpoint").exists()


def test_different_dtypes_are_found_before_the_first_step(tmp_path: Path, ranks: Ranks) -> None:
    with reserved_addresses(2) as addresses:
        started = ranks.start(
            "train.py",
            {"worker": addresses},
            arguments=settings(tmp_path, optimizers=["adam"]),
            task_arguments={"worker:1": [json.dumps({"dtype": "float32"})]},
        )
        for rank in started:
            assert rank.wait() == 65, rank.output
            assert "rank 0 has [5, 8] float64, rank 1 has [5, 8] float32" in rank.output


@pytest.mark.parametrize("model", ["mlp", "averages"])
def test_input_tensors_that_end_early_on_one_rank_end_the_training_of_all(
    tmp_path: Path, ranks: Ranks, model: str
) -> None:
    with reserved_addresses(2) as addresses:
        started = ranks.start(
            "train.py",
            {"worker": addresses},
            arguments=settings(
                tmp_path, optimizers=["adam"], steps=50, as_tensors=True, model=model
            ),
            task_arguments={"worker:1": [json.dumps({"batches": 9})]},
        )
        for rank in started:
            assert rank.wait() == 200, rank.output
            assert "rank 1" in rank.output
            assert "Give all ranks the same number of steps" in rank.output


def test_a_checkpoint_that_is_deleted_before_the_evaluator_reads_it(tmp_path: Path) -> None:
    code = f"""
import glob, os
import estimator_ext
estimator_ext.install()
import tensorflow as tf
from estimator_ext.evaluation import CheckpointEvaluation

def data():
    return tf.data.Dataset.from_tensors(([[1.0]], [[1.0]])).repeat(3)

def data_while_the_chief_deletes():
    for path in glob.glob({str(tmp_path)!r} + "/model.ckpt-*"):
        os.remove(path)
    return data()

def model_fn(features, labels, mode):
    w = tf.compat.v1.get_variable("w", [1, 1])
    loss = tf.reduce_mean(tf.square(tf.matmul(features, w) - labels))
    step = tf.compat.v1.train.get_or_create_global_step()
    train_op = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss, step)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

estimator = estimator_ext.Estimator(model_fn, {str(tmp_path)!r})
estimator.train(data)
train_spec = tf.estimator.TrainSpec(data, max_steps=9)
eval_spec = tf.estimator.EvalSpec(data_while_the_chief_deletes, start_delay_secs=0)
print("RESULT", CheckpointEvaluation(estimator, train_spec, eval_spec).run())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=deadline_s(100),
    )
    assert "RESULT (None, [])" in done.stdout, done.stderr
    assert f"cannot read {tmp_path}/model.ckpt-3.index" in done.stderr
    assert "raise keep_checkpoint_max" in done.stderr
