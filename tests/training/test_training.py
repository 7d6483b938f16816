"""Training with real processes: roles, resuming, and faults."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from harness import reserved_addresses
from ranks import Ranks
from train_runs import evaluated_steps, final, settings, with_an_evaluator

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
    # the data repeat after 7 batches: it is resumed in the middle of them
    for name, stops in {"broken": [10, 20], "unbroken": [20]}.items():
        (tmp_path / name).mkdir()
        for steps in stops:
            chosen = {"optimizers": ["adam"], "steps": steps}
            ranks.run("train.py", 2, arguments=settings(tmp_path / name, **chosen))
    broken, unbroken = final(tmp_path / "broken"), final(tmp_path / "unbroken")
    assert broken["global_step"] == 20
    for name in set(unbroken) - {"losses"}:
        np.testing.assert_array_equal(broken[name], unbroken[name], err_msg=name)


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


def test_a_nan_is_named_by_all_ranks_and_its_step_is_not_saved(
    tmp_path: Path, ranks: Ranks
) -> None:
    chosen = {"optimizers": ["adam"], "steps": 7, "nan_at": [1, 4], "checkpoint_steps": 1}
    with reserved_addresses(2) as addresses:
        started = ranks.start(
            "train.py", {"worker": addresses}, arguments=settings(tmp_path, **chosen)
        )
        for rank in started:
            assert rank.wait() == 79, rank.output
            assert "not finite in step 4 " in rank.output
            assert re.search(r"rank 1 \(worker:1, .*NaN for 'dense/kernel'", rank.output)
    assert tf.train.latest_checkpoint(str(tmp_path / "model" / "adam")).endswith("ckpt-4")
