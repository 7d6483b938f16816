"""Trainings of tests/programs/divided_updates.py, and what they save."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import tensorflow as tf
from ranks import Ranks

ALL = ["first", "last", "second"]
LARGE = ["first", "second"]
# with optimizers that update single rows
ROWS = ["rows_of_adadelta", "rows_of_adagrad", "rows_of_adagrad_held", "rows_of_adagrad_loaded"]
ROWS += ["rows_of_ftrl", "rows_of_keras", "rows_of_momentum", "rows_of_rmsprop"]
# with optimizers that also change the slots of all other rows
SOME_ROWS = ["embedding", "rows_of_keras_adam"]
TABLES = [*ROWS, *SOME_ROWS, "rows_of_ftrl_slots_read"]
# the gradients of two ranks are so few bytes that they travel in one exchange, not in a bucket
DIVIDED_BY_TWO = {"float16": LARGE, "bfloat16": LARGE}
DIVIDED_OVER_NETWORK = {"slots": ["first"], **dict.fromkeys(SOME_ROWS, ALL)}
DIVIDED = {
    "clipped": LARGE,  # the norm needs whole gradients, and the last variable is small
    "summary_of_one": LARGE,  # rank 0 has a summary of a gradient
    "empty": ["empty", *ALL],
    **{each: [*ALL, "table_4", "table_7"] for each in TABLES},
    "slices": [*ALL, "wide"],
    "two": LARGE,  # one update waits for the others
    "skipped": [],  # each update is in a branch
    "decayed_before": [],  # the updates wait for each other
    "own_clipped": LARGE,
    "own_lamb": [],
    "own_previous": [*LARGE, "wide"],
    "own_summary": ["second"],  # rank 0 shows what the update of the first computes
    "partitioned": ["first/part_0", "first/part_1", "last", "second"],
}


def run(
    directory: Path,
    cases: list[str],
    size: int,
    shards: bool | None,
    steps: str = "4,10",
    communication: str = "auto",
) -> str:
    """Trains, and returns the output of rank 0."""
    directory.mkdir(exist_ok=True)
    environ = {
        "HOSTOPT_SHARD_OPTIMIZER": str(shards).lower(),
        "HOSTOPT_COMMUNICATION": communication,
    }
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


def compare(directory: Path, cases: list[str], size: int = 2, communication: str = "auto") -> None:
    """Trains with and without divided updates, which must save the same."""
    run(directory / "whole", cases, size, False, communication=communication)
    output = run(directory / "divided", cases, size, True, communication=communication)
    expected = {**DIVIDED, **(DIVIDED_BY_TWO if size == 2 else {})}
    if communication == "grpc+tcp":
        expected.update(DIVIDED_OVER_NETWORK)
    for case in cases:
        assert divided(output, case) == expected.get(case, ALL), case
        check_same(directory / "divided" / case, directory / "whole" / case)
        paths = list((directory / "whole").glob(f"{case}-*.npz"))  # what each rank has read
        assert len(paths) == (size if case.endswith("_slots_read") else 0)
        for path in paths:
            with np.load(path) as whole, np.load(directory / "divided" / path.name) as found:
                assert whole.files == found.files
                for name in whole.files:
                    np.testing.assert_array_equal(found[name], whole[name])
