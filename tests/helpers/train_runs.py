"""Runs of tests/programs/train.py, and what they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from harness import reserved_addresses
from ranks import Rank, Ranks
from summaries import summaries

Runs = dict[int, dict[str, dict[str, Any]]]


def settings(tmp_path: Path, **chosen: Any) -> list[str]:
    directories = {"model_dir": str(tmp_path / "model"), "dump_dir": str(tmp_path)}
    return [json.dumps({**directories, **chosen})]


def final(tmp_path: Path, rank: int = 0, optimizer: str = "adam") -> dict[str, np.ndarray]:
    return dict(np.load(tmp_path / f"{optimizer}-{rank}.npz"))


def evaluated_steps(eval_dir: Path, tag: str = "acc") -> list[int]:
    """Returns the steps for which an evaluation wrote an accuracy, once for each writer."""
    return [step for step, _, _ in summaries(eval_dir, tag)]


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


class Trainings:
    """Trains many models, all of a rank in one process.

    Args:
      runs: settings of the trainings, by number of ranks and name.
    """

    def __init__(self, directory: Path, runs: Runs) -> None:
        self._directory, self._runs = directory, runs
        self._outputs: dict[int, list[str]] = {}
        for size, chosen_by_name in runs.items():
            settings = []
            for name, chosen in chosen_by_name.items():
                dump_dir = self._dump_dir(size, name)
                dump_dir.mkdir(parents=True)
                model_dir = str(directory / str(size) / chosen.get("model_dir", name) / "model")
                settings.append({**chosen, "dump_dir": str(dump_dir), "model_dir": model_dir})
            common = {"optimizers": ["adam"], "checkpoint_steps": 100, "runs": settings}
            with Ranks(directory / str(size)) as ranks:
                started = ranks.run("train.py", size, arguments=[json.dumps(common)])
            self._outputs[size] = [rank.output for rank in started]

    def _dump_dir(self, size: int, name: str) -> Path:
        return self._directory / str(size) / name

    def variables(self, size: int, name: str) -> list[dict[str, np.ndarray]]:
        """Returns the final variables and the losses of each rank, by name."""
        dump_dir = self._dump_dir(size, name)
        return [dict(np.load(*dump_dir.glob(f"*-{rank}.npz"))) for rank in range(size)]

    def checkpoint(self, size: int, name: str, step: int) -> Any:
        """Returns the checkpoint of rank 0 after a step."""
        model_dir = self._directory / str(size) / self._runs[size][name].get("model_dir", name)
        return tf.train.load_checkpoint(str(model_dir / "model" / "adam" / f"model.ckpt-{step}"))

    def log_counts(self, size: int, text: str) -> list[int]:
        """Counts how often each rank has logged a text, in all of its runs."""
        return [output.count(text) for output in self._outputs[size]]


def check_equal(many: list[dict[str, np.ndarray]], one: list[dict[str, np.ndarray]]) -> None:
    """Checks that many workers equal one, and that all of them hold the same bits."""
    for result in many:
        assert set(result) == set(one[0])
        for name, expected in one[0].items():
            np.testing.assert_allclose(result[name], expected, rtol=0, atol=1e-10, err_msg=name)
            np.testing.assert_array_equal(result[name], many[0][name], err_msg=name)
