"""Ranks that train by themselves and synchronise every few steps, against NumPy."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from harness import reserved_addresses
from local_training import Training, assert_close, failure, simulate
from ranks import Ranks

import hostopt

BROKEN = {
    "whole": {
        "inner": "momentum",
        "outer": "nesterov",
        "dtype": "float32",
        "checkpoint_steps": 5,
        "strategy": {"sync_every": 5, "sync_slots": "keep", "sync_compression": "int8"},
    },
    "fragments": {
        "inner": "adam",
        "outer": "outer adam functions",
        "dtype": "float32",
        "checkpoint_steps": 5,
        "strategy": {
            "sync_every": 4,
            "sync_fragments": 2,
            "sync_delay": 1,
            "sync_compression": "int4",
            "sync_warmup_steps": 3,
        },
    },
    # the data of rank 0, which saves, end first
    "uneven": {
        "batches": [7, 20],
        "outer": "nesterov",
        "checkpoint_steps": 5,
        "strategy": {"sync_every": 5},
    },
}


# between synchronisations, after one, and while one runs in the background
@pytest.fixture
def training(ranks: Ranks, tmp_path: Path) -> Training:
    return Training(ranks, tmp_path)


@pytest.mark.parametrize(
    ("name", "at"), [("whole", 12), ("whole", 15), ("fragments", 13), ("uneven", 13)]
)
def test_a_killed_training_resumes_exactly(training: Training, name: str, at: int) -> None:
    settings = BROKEN[name]
    expected = training.run(2, expected=settings)["expected"]
    arguments = [training.arguments({"broken": {**settings, "kill": [1, at]}})]
    codes = [hostopt.errors.PeerLostError.exit_code, -9]
    training.ranks.run("local_steps.py", 2, codes=codes, arguments=arguments)
    saved = tf.train.latest_checkpoint(str(training.directory / "broken" / "model"))
    assert {"whole": 10, "fragments": 7, "uneven": 10}[name] <= int(saved.rpartition("-")[2]) <= at
    models = training.run(2, broken=settings)["broken"]
    for key, value in expected[0].items():
        np.testing.assert_array_equal(models[0][key], value, err_msg=key)


def test_a_signal_stops_all_ranks_long_before_the_next_synchronisation(
    training: Training,
) -> None:
    ranks = failure(
        training,
        [143, 143],
        kill=[1, 7],
        signal="SIGTERM",
        steps=10**6,
        strategy={"sync_every": 10**6},
    )
    saved = tf.train.latest_checkpoint(str(training.directory / "failing" / "model"))
    assert saved is not None, ranks[0].output
    step = int(saved.rpartition("-")[2])
    assert_close(training.variables("failing", 2), simulate(2, step, 10**6))


def test_a_stall_in_the_background_is_found(training: Training) -> None:
    # rank 0, busy in step 32, waits in the background for rank 1, which never reaches step 30
    options = {"sync_every": 10, "sync_delay": 8, "stall_warning_s": 1, "collective_timeout_s": 3}
    settings = {"stuck": [1, 29], "busy": [0, 32], "steps": 60, "strategy": options}
    with reserved_addresses(2) as addresses:
        chief, stuck = training.ranks.start(
            "local_steps.py",
            {"worker": addresses},
            arguments=[training.arguments({"failing": settings})],
        )
        assert chief.wait() == hostopt.errors.CollectiveTimeoutError.exit_code, chief.output
        stuck.process.kill()
        stuck.process.wait()
    assert "the ring has failed in the background" in chief.output
    assert "rank 0 has waited 1." in chief.output  # the warning before the timeout
    assert f"rank 1 (worker:1, {addresses[1]}) is in no collective" in chief.output


def test_nan_in_the_gradients_of_a_rank(training: Training) -> None:
    code = hostopt.errors.NonFiniteGradientError.exit_code
    ranks = failure(training, [code, code], nan_at=[1, 7], strategy={"sync_every": 5})
    assert "rank 1 (worker:1" in ranks[0].output
    assert "weights" in ranks[0].output


def test_a_variable_without_a_finite_value(training: Training) -> None:
    code = hostopt.errors.NonFiniteGradientError.exit_code
    ranks = failure(training, [code, code], infinite=True, strategy={"sync_every": 5})
    for rank in ranks:
        assert "variable 'least' is NaN or Inf before the first step" in rank.output


def test_a_variable_that_one_rank_changes(training: Training) -> None:
    code = hostopt.errors.CollectiveMismatchError.exit_code
    ranks = failure(training, [code, code], change=[1, 7], strategy={"sync_every": 5})
    assert "'frozen': rank 0 has" in ranks[0].output


def test_ranks_with_different_options(training: Training) -> None:
    arguments = {
        f"worker:{rank}": [training.arguments({"x": {"strategy": {"sync_every": 5 + rank}}})]
        for rank in range(2)
    }
    codes = [hostopt.errors.CollectiveMismatchError.exit_code]
    ranks = training.ranks.run("local_steps.py", 2, codes=codes, task_arguments=arguments)
    assert "'sync_every': rank 0 has 5, rank 1 has 6" in ranks[1].output


def test_a_checkpoint_without_the_slots_of_the_outer_optimizer(training: Training) -> None:
    training.run(2, failing={"steps": 5, "strategy": {"sync_every": 5}})
    code = hostopt.CheckpointError.exit_code
    ranks = failure(training, [code, code], steps=9, outer="nesterov", strategy={"sync_every": 5})
    assert re.search("has no 'outer/(bias|weights)/Momentum', a slot of outer", ranks[0].output)
