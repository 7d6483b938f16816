"""Divided updates of all optimizers, on other numbers of ranks, and after a kill."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from divided import ROWS, SOME_ROWS, arrays, check_same, compare, run
from harness import reserved_addresses
from ranks import Ranks

OPTIMIZERS = ["sgd", "momentum", "rmsprop", "centered", "adagrad", "ftrl", "adadelta"]
OPTIMIZERS += ["keras_adam", "keras_adamax", "keras_rmsprop", "float64", "float16", "bfloat16"]
PROGRAMS = ["clipped", "average", "in_place", "loaded", "no_slots", "partitioned"]
PROGRAMS += ["accumulate", "skipped", "summary_of_one", "empty"]
OWN = ["own_adam", "own_clipped", "own_lamb", "own_previous", "own_summary"]
OWN += ["decayed", "decayed_before", "keras_constraint"]


@pytest.mark.parametrize(("size", "communication"), [(2, "shm"), (3, "grpc+tcp")])
@pytest.mark.parametrize(
    "cases", [OPTIMIZERS, PROGRAMS, OWN], ids=["optimizers", "programs", "own"]
)
def test_checkpoints_are_those_of_undivided_updates(
    tmp_path: Path, cases: list[str], size: int, communication: str
) -> None:
    compare(tmp_path, cases, size, communication)


@pytest.mark.parametrize("communication", ["grpc+tcp", "shm"])
@pytest.mark.parametrize("size", [2, 3])
def test_rows_are_divided(tmp_path: Path, size: int, communication: str) -> None:
    compare(tmp_path, [*ROWS, *SOME_ROWS], size, communication)


@pytest.mark.parametrize(
    ("case", "communication"),
    [
        ("adam", "shm"),
        ("own_adam", "grpc+tcp"),
        ("own_adam", "shm"),
        ("rows_of_adagrad", "grpc+tcp"),
        ("rows_of_adagrad", "shm"),
    ],
)
def test_another_number_of_ranks_continues(tmp_path: Path, case: str, communication: str) -> None:
    for name, shards in (("whole", False), ("divided", True)):
        for size, steps in ((3, "3"), (1, "6"), (2, "9")):
            run(tmp_path / name, [case], size, shards, steps, communication)
            # another number of ranks reads the data from the start
            for file in (tmp_path / name / case).glob("*.input"):
                file.unlink()
    check_same(tmp_path / "divided" / case, tmp_path / "whole" / case)


def test_the_saved_graph_can_be_trained_on(tmp_path: Path) -> None:
    run(tmp_path, ["reads"], 2, True, "4")
    path = tf.train.latest_checkpoint(str(tmp_path / "reads"))
    saved = arrays(tmp_path / "reads")
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        tf.compat.v1.train.import_meta_graph(f"{path}.meta", clear_devices=True)
        variables = tf.compat.v1.trainable_variables()
        tf.compat.v1.train.Saver(variables).restore(session, path)
        for variable, value in zip(variables, session.run(variables)):
            np.testing.assert_array_equal(value, saved[variable.op.name])
        loss = graph.get_tensor_by_name("Mean:0")
        assert None not in tf.gradients(loss, variables)


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


@pytest.mark.parametrize(
    ("communication", "case", "codes", "text"),
    [
        ("grpc+tcp", "assigned", [78, 78], "slot 'first/Adam' was assigned during the training"),
        ("shm", "assigned", [78, 78], "slot 'first/Adam' was assigned during the training"),
        ("grpc+tcp", "read_slot", [78, 78], "slot 'first/Adam' has no value during the training"),
        ("shm", "read_by_name", [78, 78], "Fetch the variable itself, save with a Saver made"),
        ("grpc+tcp", "fetched", [1, 200], "rank has a part of it, as the ranks divide"),
        ("shm", "own_fetched", [1, 200], "what its update computes was fetched"),
        ("grpc+tcp", "writes", [78, 78], "uses variable 'first' in a branch"),
    ],
)
def test_what_has_only_a_part_of_a_value_is_refused(
    tmp_path: Path, communication: str, case: str, codes: list[int], text: str
) -> None:
    with Ranks(tmp_path) as ranks:
        started = ranks.run(
            "divided_updates.py",
            2,
            codes=codes,
            arguments=[str(tmp_path), "4", case],
            environ={"HOSTOPT_SHARD_OPTIMIZER": "true", "HOSTOPT_COMMUNICATION": communication},
        )
    assert text in started[0].output


def test_a_rank_has_no_slots_in_memory_of_its_own(tmp_path: Path) -> None:
    size, nbytes = 4, 96 << 20

    def private_bytes(shards: str) -> list[int]:
        with Ranks(tmp_path) as ranks:
            started = ranks.run(
                "divided_memory.py",
                size,
                arguments=[str(nbytes >> 20)],
                environ={"HOSTOPT_SHARD_OPTIMIZER": shards},
            )
        return [int(re.findall(r"PRIVATE (\d+)", each.output)[-1]) for each in started]

    saved = 2 * nbytes  # Adam has two slots, in memory that the ranks share
    for whole, less in zip(private_bytes("false"), private_bytes("true")):
        assert whole - less > saved
