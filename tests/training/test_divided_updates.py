"""Ranks that divide the updates train as those that do not, bit for bit."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from harness import reserved_addresses
from ranks import Ranks

CASES = ["adam", "sgd", "embedding", "clipped", "two", "average", "in_place", "held", "no_slots"]
NIGHTLY = ["momentum", "rmsprop", "centered", "adagrad", "ftrl", "adadelta", "keras_adam"]
NIGHTLY += ["keras_adamax", "keras_rmsprop", "float64", "partitioned", "loaded", "accumulate"]
# of their variables `first`, `second` and `last`, the last is too small
ALL = ["first", "second"]
DIVIDED = {
    "slots": ["first"],  # a summary shows a slot of the second
    "skipped": [],  # each update is in a branch
    "partitioned": ["first/part_0", "first/part_1", "second"],
}


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> list[str]:
    return CASES + ["slots", "skipped"] + NIGHTLY * request.config.option.nightly


def run(directory: Path, cases: list[str], size: int, shards: bool, steps: str = "4,10") -> str:
    """Trains, and returns the output of rank 0."""
    directory.mkdir(exist_ok=True)
    environ = {"HOSTOPT_SHARD_OPTIMIZER": str(shards).lower()}
    arguments = [str(directory), steps, *cases]
    with Ranks(directory) as ranks:
        started = ranks.run("divided_updates.py", size, arguments=arguments, environ=environ)
        return started[0].output


def arrays(model_dir: Path) -> dict[str, np.ndarray]:
    """Returns what the last checkpoint holds."""
    reader = tf.compat.v1.train.NewCheckpointReader(tf.train.latest_checkpoint(str(model_dir)))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def check_same(model_dir: Path, other_dir: Path) -> None:
    found, wanted = arrays(model_dir), arrays(other_dir)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=f"{model_dir.name}: {name}")


def divided(output: str, case: str) -> list[str]:
    text = output.split(f"CASE {case} to")[1]
    found = re.search(r"divide the updates of (\d+) variables: (.*)", text)
    assert found is not None, text
    return [name for name in found[2].strip().split(", ") if name]


def test_checkpoints_are_those_of_undivided_updates(tmp_path: Path, cases: list[str]) -> None:
    run(tmp_path / "whole", cases, 2, False)
    output = run(tmp_path / "divided", cases, 2, True)
    for case in cases:
        assert divided(output, case) == DIVIDED.get(case, ALL), case
        check_same(tmp_path / "divided" / case, tmp_path / "whole" / case)


def test_another_number_of_ranks_continues(tmp_path: Path) -> None:
    for name, shards in (("whole", False), ("divided", True)):
        for size, steps in ((3, "3"), (1, "6"), (2, "9")):
            run(tmp_path / name, ["adam"], size, shards, steps)
            # another number of ranks reads the data from the start
            for file in (tmp_path / name / "adam").glob("*.input"):
                file.unlink()
    check_same(tmp_path / "divided" / "adam", tmp_path / "whole" / "adam")


@pytest.mark.parametrize("communication", ["grpc+tcp", "shm"])
def test_a_killed_training_resumes(tmp_path: Path, communication: str) -> None:
    options = {"HOSTOPT_SHARD_OPTIMIZER": "true", "HOSTOPT_COMMUNICATION": communication}
    run(tmp_path / "whole", ["adam"], 2, False, "12")
    with Ranks(tmp_path) as ranks, reserved_addresses(2) as addresses:
        arguments = [str(tmp_path / "divided"), "12", "steps"]
        started = ranks.start(
            "divided_updates.py", {"worker": addresses}, arguments=arguments, environ=options
        )
        started[1].wait_for_output("STEP 8")
        started[1].signal(signal.SIGKILL)
        started[0].wait()
    run(tmp_path / "divided", ["steps"], 2, True, "12")
    check_same(tmp_path / "divided" / "steps", tmp_path / "whole" / "adam")


def test_a_slot_that_the_program_assigns_is_refused(tmp_path: Path) -> None:
    with Ranks(tmp_path) as ranks:
        started = ranks.run(
            "divided_updates.py",
            2,
            codes=[78],
            arguments=[str(tmp_path), "4", "assigned"],
            environ={"HOSTOPT_SHARD_OPTIMIZER": "true"},
        )
    assert "slot 'first/Adam' was assigned during the training" in started[0].output
