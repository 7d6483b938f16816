"""Training with real processes: roles, resuming, and faults."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from harness import run_python
from ranks import Ranks
from train_runs import evaluated_steps, final, settings, with_an_evaluator

# -- roles ---------------------------------------------------------------------------------


def test_an_evaluator_ends_with_a_training_that_ends_early(tmp_path: Path, ranks: Ranks) -> None:
    chosen = {"optimizers": ["adam"], "api": "ours", "steps": 1000, "batches": 30}
    started = with_an_evaluator(tmp_path, ranks, chosen)
    assert "training has ended" in started[-1].output
    assert evaluated_steps(tmp_path / "model" / "adam" / "eval")[-1] == 30


# -- resuming ------------------------------------------------------------------------------


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


def test_different_dtypes_are_found_before_the_first_step(tmp_path: Path, ranks: Ranks) -> None:
    arguments = settings(tmp_path, optimizers=["adam"])
    other = {"worker:1": [json.dumps({"dtype": "float32"})]}
    for rank in ranks.run("train.py", 2, codes=[65], arguments=arguments, task_arguments=other):
        assert "rank 0 has [5, 8] float64, rank 1 has [5, 8] float32" in rank.output


@pytest.mark.parametrize("model", ["mlp", "averages"])
def test_input_tensors_that_end_early_on_one_rank_end_the_training_of_all(
    tmp_path: Path, ranks: Ranks, model: str
) -> None:
    chosen = {"optimizers": ["adam"], "steps": 50, "as_tensors": True, "model": model}
    arguments = settings(tmp_path, **chosen)
    other = {"worker:1": [json.dumps({"batches": 9})]}
    for rank in ranks.run("train.py", 2, codes=[200], arguments=arguments, task_arguments=other):
        assert "rank 1" in rank.output
        assert "Give all ranks the same number of steps" in rank.output


def test_a_checkpoint_that_is_deleted_before_the_evaluator_reads_it(tmp_path: Path) -> None:
    code = f"""
import glob, os
import estimator_ext
estimator_ext.install()
import tensorflow as tf
from estimator_ext.evaluation.evaluation import CheckpointEvaluation

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
    done = run_python("-c", code, code=None, limit_s=100)
    assert "RESULT (None, [])" in done.stdout, done.stderr
    assert f"cannot read {tmp_path}/model.ckpt-3.index" in done.stderr
    assert "raise keep_checkpoint_max" in done.stderr
