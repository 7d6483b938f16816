"""Trainings with a NaN gradient: they end, skip the update of the step, or continue."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from ranks import Rank, Ranks

_GROUP_S = 250
# The first test waits for the trainings of all groups.


ALL = ["sgd", "momentum", "adam"]
SKIPPED = {"steps": 7, "nan_at": [1, 4], "nonfinite": "skip"}
LEFT_OUT = {"steps": 6, "leave_out": [4]}
LENGTHS = [[4, 4, 4, 2, 3], [4, 3]]
KINDS: dict[str, dict[str, Any]] = {
    "host_call": {"optimizers": ALL},
    "minimize": {"optimizers": ALL, "spec": "minimize"},
    "two optimizers": {"spec": "two_minimize"},
    "clipped": {"optimizers": ["sgd"], "clip": 0.05, "learning_rate": 0.5},
    "sparse": {"model": "embedding"},
    "on the accelerator": {"variables_on_host": False},
    "in buckets": {"bucket_mb": 128 / 2**20},
    "NaN loss": {"nan_loss": True},
}
MICRO = {"accumulate_steps": 2}
ERROR = {"steps": 7, "nan_at": [1, 4], "checkpoint_steps": 1}
# One process of each rank runs these trainings in turn; the last one ends with an error.
RUNS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "one": (
        1,
        {
            **{f"{kind}, left out": {**chosen, **LEFT_OUT} for kind, chosen in KINDS.items()},
            "micro-batches, left out": {**MICRO, "steps": 2, "leave_out": [3, 2]},
            "uneven, left out": {"lengths": LENGTHS, "steps": 60, "leave_out": [3]},
            "skip": {**SKIPPED, **KINDS["host_call"], "nan_at": [0, 4]},
            "error": {**ERROR, "nan_at": [0, 4]},
        },
    ),
    "grpc": (
        2,
        {
            **{kind: {**chosen, **SKIPPED} for kind, chosen in KINDS.items()},
            "micro-batches": {**MICRO, **SKIPPED, "steps": 3, "nan_at": [1, 1]},
            "uneven": {"lengths": LENGTHS, **SKIPPED, "steps": 60, "nan_at": [0, 3]},
            "scaled": {"loss_scale": True, "steps": 6},
            "scaled, skip": {"loss_scale": True, "steps": 6, "nonfinite": "skip"},
            "warn": {**SKIPPED, "nonfinite": "warn", "nan_loss": True},
            "unbroken": {"steps": 4},
            "error": {**ERROR, "nan_loss": True},
        },
    ),
    "shm": (
        2,
        {
            **{kind: {**KINDS[kind], **SKIPPED} for kind in ("host_call", "minimize", "sparse")},
            "warn": {**SKIPPED, "nonfinite": "warn"},
            "unbroken": {"steps": 4},
            "error": ERROR,
        },
    ),
}


class Trainings:
    """Trains all models.

    Args:
      directory: directory of variables, checkpoints and output.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.ranks: dict[str, list[Rank]] = {}
        for where, (size, runs) in RUNS.items():
            settings = []
            for name, chosen in runs.items():
                dump_dir = directory / where / name
                dump_dir.mkdir(parents=True)
                dirs = {"dump_dir": str(dump_dir), "model_dir": str(dump_dir / "model")}
                settings.append({**chosen, **dirs})
            common: dict[str, Any] = {"optimizers": ["adam"], "runs": settings}
            common["communication"] = "auto" if where == "one" else where
            arguments = [json.dumps(common)]
            with Ranks(directory / where) as ranks:
                self.ranks[where] = ranks.run(
                    "train.py", size, codes=[79], limit_s=_GROUP_S, arguments=arguments
                )

    def variables(self, where: str, name: str) -> list[dict[str, np.ndarray]]:
        """Returns the final variables of each rank, by optimizer and name."""
        return [
            {
                f"{path.stem[:-2]} {variable}": value
                for path in sorted((self._directory / where / name).glob(f"*-{rank}.npz"))
                for variable, value in np.load(path).items()
                if variable != "losses"
            }
            for rank in range(RUNS[where][0])
        ]

    def newest_checkpoint(self, where: str, name: str) -> Any:
        """Reads what rank 0 saved last."""
        return tf.train.load_checkpoint(str(self._directory / where / name / "model" / "adam"))


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("trainings"))


def check_equal(
    many: list[dict[str, np.ndarray]], one: list[dict[str, np.ndarray]], steps: int
) -> None:
    """Checks that all ranks equal one process, except for the number of steps."""
    for result in many:
        assert set(result) == set(one[0])
        for name, expected in one[0].items():
            if name.endswith(" global_step"):
                assert result[name] == steps
                continue
            np.testing.assert_allclose(result[name], expected, rtol=0, atol=1e-10, err_msg=name)
            np.testing.assert_array_equal(result[name], many[0][name], err_msg=name)


# -- skip ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "kind"),
    [(where, kind) for where in ("grpc", "shm") for kind in RUNS[where][1] if kind in KINDS],
)
def test_a_skipped_step_changes_nothing_but_the_step_count(
    trainings: Trainings, where: str, kind: str
) -> None:
    check_equal(
        trainings.variables(where, kind), trainings.variables("one", f"{kind}, left out"), 7
    )


def test_a_single_rank_skips_the_same_steps(trainings: Trainings) -> None:
    expected = trainings.variables("one", "host_call, left out")
    check_equal(trainings.variables("one", "skip"), expected, 7)


def test_all_micro_batches_of_a_step_are_skipped(trainings: Trainings) -> None:
    expected = trainings.variables("one", "micro-batches, left out")
    check_equal(trainings.variables("grpc", "micro-batches"), expected, 3)


def test_a_step_is_skipped_after_the_data_of_another_rank_have_ended(trainings: Trainings) -> None:
    expected = trainings.variables("one", "uneven, left out")
    check_equal(trainings.variables("grpc", "uneven"), expected, 5)


def test_every_rank_names_rank_variable_and_step(trainings: Trainings) -> None:
    for where in ("grpc", "shm"):
        for rank in trainings.ranks[where]:
            for variable in ("dense/kernel", "dense/bias"):
                assert f"NaN for '{variable}'" in rank.output
            lines = [text for text in rank.output.splitlines() if "not finite in step 4 " in text]
            assert lines
            assert all("rank 1 (worker:1, " in text for text in lines)
            sparse = [text for text in lines if "NaN for 'table'" in text]
            assert sparse
            assert all("No variable is updated" in text for text in sparse)


# -- loss scaling --------------------------------------------------------------------------


def test_loss_scaling_handles_nonfinite_values(trainings: Trainings) -> None:
    first, second = (trainings.variables("grpc", name) for name in ("scaled", "scaled, skip"))
    check_equal(second, first, 6)
    assert first[0]["adam loss_scale"] == 512  # 1024, halved by the third step
    np.testing.assert_allclose(first[0]["adam beta1_power"], 0.9**6, rtol=1e-6)


# -- warn ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["grpc", "shm"])
def test_training_continues_after_a_warning(trainings: Trainings, where: str) -> None:
    for result in trainings.variables(where, "warn"):
        assert result["adam global_step"] == 7
        assert np.isnan(result["adam dense/kernel"]).all()
    for rank in trainings.ranks[where]:
        assert "NaN for 'dense/bias'" in rank.output
        assert ". The update is made" in rank.output


# -- error ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", RUNS)
def test_every_rank_exits_with_the_code_and_names_the_cause(
    trainings: Trainings, where: str
) -> None:
    last = RUNS[where][0] - 1
    lines = []
    for rank in trainings.ranks[where]:
        assert rank.wait() == 79, rank.output
        shown = rank.output.rstrip().splitlines()[-1].partition("NonFiniteGradientError: ")[2]
        lines.append(shown.partition(" [traceback: ")[0])
    assert len(set(lines)) == 1
    assert lines[0].startswith("not finite in step 4 ")
    assert f"rank {last} (worker:{last}, " in lines[0]
    assert lines[0].count(" has ") == 1  # one rank
    kind = "NaN or Inf" if where == "one" else "NaN"
    for variable in ("dense/kernel", "dense/bias"):
        assert f"{kind} for '{variable}'" in lines[0]
    if where != "grpc":  # with a NaN loss as well
        assert "for 'dense_1/" not in lines[0]


@pytest.mark.parametrize("where", ["grpc", "shm"])
def test_the_newest_checkpoint_precedes_the_failed_step(trainings: Trainings, where: str) -> None:
    result, expected = (trainings.newest_checkpoint(where, name) for name in ("error", "unbroken"))
    assert result.get_tensor("global_step") == 4
    for name in expected.get_variable_to_shape_map():
        np.testing.assert_array_equal(
            result.get_tensor(name), expected.get_tensor(name), err_msg=name
        )
