"""Data that a restarted process resumes by skipping the batches that it has read."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from harness import deadline_s, reserved_addresses
from ranks import Rank, Ranks

STEPS = 14
Batches = list[list[list[float]]]  # of each rank


class Trainings:
    """Trainings of tests/programs/generator_input.py in one model_dir.

    Args:
      directory: directory of files.
      size: number of ranks.
      settings: settings of all trainings.
    """

    def __init__(self, directory: Path, size: int, **settings: Any) -> None:
        self._directory = directory
        self._size = size
        self._settings = {"model_dir": str(directory / "model"), **settings}
        self._count = 0
        directory.mkdir(exist_ok=True)

    def run(self, *, code: int = 0, **settings: Any) -> list[Rank]:
        """Trains; checks the exit code of rank 0, and returns the ranks."""
        self._count += 1
        chosen = {**self._settings, **settings, "records": str(self._records())}
        with reserved_addresses(self._size) as addresses, Ranks(self._directory) as ranks:
            jobs, arguments = {"worker": addresses}, [json.dumps(chosen)]
            started = ranks.start("generator_input.py", jobs, arguments=arguments)
            codes = [rank.wait() for rank in started]
        assert codes[0] == code, "\n".join(rank.output for rank in started)
        return started

    def _records(self) -> Path:
        return self._directory / f"records-{self._count}"

    def batches(self) -> Batches:
        """Returns the batches of the last training, in the order in which each rank used them."""
        files = [self._records() / f"{rank}.jsonl" for rank in range(self._size)]
        return [
            [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
            for file in files
        ]

    def saved_step(self) -> int:
        """Returns the step of the newest checkpoint."""
        return int(self._checkpoint().rpartition("-")[2])

    def weight(self) -> float:
        return float(tf.train.load_variable(self._checkpoint(), "weight")[0])

    def _checkpoint(self) -> str:
        return tf.train.latest_checkpoint(self._settings["model_dir"])


@pytest.fixture
def interrupted(tmp_path: Path) -> Iterator[Any]:
    """`interrupted(size, ...)` compares a training that is killed and resumed with a whole one."""

    def compare(size: int, kill_at: int = 8, **settings: Any) -> tuple[Trainings, list[Rank]]:
        whole = Trainings(tmp_path / "whole", size, **settings)
        whole.run()
        broken = Trainings(tmp_path / "broken", size, **settings)
        last = size - 1
        broken.run(code=200 if last else -signal.SIGKILL, kill=[last, kill_at])
        before, steps = broken.batches(), broken.saved_step()
        assert steps > 0
        ranks = broken.run()
        count = steps * settings.get("run_config", {}).get("accumulate_steps", 1)
        joined = [[*old[:count], *new] for old, new in zip(before, broken.batches())]
        assert joined == whole.batches()
        assert broken.weight() == whole.weight()
        return broken, ranks

    yield compare


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("pipeline", ["documentation", "random", "tensors", "queue"])
def test_a_killed_training_resumes_with_the_same_batches(
    interrupted: Any, size: int, pipeline: str
) -> None:
    _, ranks = interrupted(size, pipeline=pipeline, max_steps=STEPS)
    for number, rank in enumerate(ranks):
        assert f"rank {number}: skipped 6 batches in " in rank.output


def test_micro_batches_are_counted(interrupted: Any) -> None:
    run_config = {"resume_data": "skip", "accumulate_steps": 3}
    _, ranks = interrupted(2, max_steps=STEPS, run_config=run_config)
    assert "rank 1: skipped 18 batches in " in ranks[1].output


@pytest.mark.parametrize(("kind", "pipeline"), [("skip", "documentation"), ("state", "stored")])
def test_a_loop_of_steps_resumes(interrupted: Any, kind: str, pipeline: str) -> None:
    run_config = {"resume_data": kind, "iterations_per_loop": 4}
    interrupted(1, kill_at=3, pipeline=pipeline, max_steps=16, run_config=run_config)


def test_random_numbers_of_a_generator_are_those_of_the_checkpoint(interrupted: Any) -> None:
    interrupted(2, max_steps=STEPS, is_noisy=True)


def test_batches_of_local_steps_are_counted(interrupted: Any) -> None:
    interrupted(2, max_steps=STEPS, strategy={"sync_every": 2})


def test_ranks_with_uneven_data_skip_their_own_batches(interrupted: Any) -> None:
    by_rank = {"0": {"length": 58}, "1": {"length": 18}}
    _, ranks = interrupted(2, pipeline="finite", by_rank=by_rank)
    assert "rank 0: skipped 6 batches" in ranks[0].output
    assert "rank 1: skipped 5 batches" in ranks[1].output  # its last batch is smaller


def test_data_that_end_early_are_an_error(tmp_path: Path) -> None:
    trainings = Trainings(tmp_path, 2, pipeline="finite", max_steps=STEPS)
    trainings.run(code=200, length=200, kill=[1, 8])
    ranks = trainings.run(code=74, by_rank={"0": {"length": 17}, "1": {"length": 100}})
    assert "rank 0 has 5 batches, wanted the 6 that it read before" in ranks[0].output


def test_data_in_another_order_are_named(tmp_path: Path) -> None:
    trainings = Trainings(tmp_path, 1, pipeline="unstable", max_steps=STEPS)
    trainings.run(code=-signal.SIGKILL, kill=[0, 8])
    (rank,) = trainings.run()
    assert "rank 0: the last of the skipped batches is not the one" in rank.output
    assert len(trainings.batches()[0]) == STEPS - 6


def test_a_rank_that_skips_for_long_does_not_exceed_the_timeout_of_the_others(
    tmp_path: Path,
) -> None:
    trainings = Trainings(
        tmp_path,
        2,
        pipeline="slow",
        max_steps=STEPS,
        by_rank={"0": {"example_s": 0.0}, "1": {"example_s": 0.0}},
    )
    trainings.run(code=200, kill=[1, 8])
    second_s = deadline_s(1.0)
    by_rank = {"0": {"example_s": 0.0}, "1": {"example_s": 0.4 * second_s}}
    # about 10 for the skipped batches
    ranks = trainings.run(by_rank=by_rank, strategy={"collective_timeout_s": 4 * second_s})
    assert re.search(r"rank 1: skipped [1-5] of 6 batches", ranks[1].output)
    assert "rank 1: skipped 6 batches in " in ranks[1].output


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("every", [3, 7])  # the last step is saved before the end, or at the end
def test_data_whose_last_batch_was_the_last_step_start_over(
    tmp_path: Path, size: int, every: int
) -> None:
    run_config = {"resume_data": "skip", "save_checkpoints_steps": every}
    trainings = Trainings(tmp_path, size, pipeline="finite", steps=6, run_config=run_config)
    chosen = {"length": 24}
    trainings.run(**chosen)
    first = trainings.batches()
    ranks = trainings.run(**chosen)
    assert trainings.batches() == first
    assert "rank 0: its data had ended, and are read from the beginning" in ranks[0].output
    trainings.run(**{**chosen, "steps": 4})
    trainings.run(**{**chosen, "steps": 2})
    assert trainings.batches() == [batches[4:] for batches in first]


def test_a_second_training_of_a_process_reads_from_the_start(tmp_path: Path) -> None:
    trainings = Trainings(tmp_path, 1, steps=3)
    trainings.run(trains=2)
    (batches,) = trainings.batches()
    assert batches[3:] == batches[:3]
    (rank,) = trainings.run()
    assert "rank 0: skipped 3 batches" in rank.output


def test_a_changed_option_starts_over_with_a_warning(tmp_path: Path) -> None:
    trainings = Trainings(tmp_path, 1, steps=3)
    trainings.run()
    first = trainings.batches()
    (rank,) = trainings.run(run_config={"resume_data": "state"})
    assert "resume_data was 'skip', and now it is 'state'" in rank.output
    assert trainings.batches() == first


def test_all_ranks_need_the_same_option(tmp_path: Path) -> None:
    trainings = Trainings(tmp_path, 2, steps=3)
    ranks = trainings.run(code=65, by_rank={"1": {"run_config": {}}})
    assert "resume_data" in ranks[0].output


def test_without_the_option_a_warning_names_it(tmp_path: Path) -> None:
    trainings = Trainings(tmp_path, 1, max_steps=STEPS, run_config={})
    trainings.run(code=-signal.SIGKILL, kill=[0, 8])
    start = trainings.batches()[0]
    (rank,) = trainings.run()
    assert "RunConfig(resume_data='skip') resumes deterministic data" in rank.output
    assert trainings.batches()[0] == start[: STEPS - 6]
