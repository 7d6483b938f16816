"""Several evaluators: their common metrics, and refused configurations."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import reserved_addresses
from ranks import Rank, Ranks
from train_runs import evaluated_steps

import estimator_ext

estimator_ext.install()


COUNTS = ("confusion", "true_positives", "global_step")


@pytest.fixture
def started(tmp_path: Path, ranks: Ranks) -> Iterator[Any]:
    """`started(count, **settings)` starts a chief and `count` evaluators of its cluster."""
    with reserved_addresses(4) as addresses:

        def start(
            count: int, task_settings: dict[str, Any] | None = None, **settings: Any
        ) -> list[Rank]:
            jobs = {"chief": addresses[:1], "evaluator": addresses[1 : 1 + count]}
            arguments = [json.dumps({"model_dir": str(tmp_path / "model"), **settings})]
            more = {name: [json.dumps(value)] for name, value in (task_settings or {}).items()}
            return ranks.start("evaluate.py", jobs, arguments=arguments, task_arguments=more)

        yield start


def result_of(rank: Rank) -> Any:
    """Returns the result of train_and_evaluate in a process."""
    (line,) = [line for line in rank.output.splitlines() if line.startswith("RESULT ")]
    return json.loads(line[len("RESULT") :])


def test_three_evaluators_compute_the_metrics_of_one(tmp_path: Path, started: Any) -> None:
    chief, *evaluators = started(3)
    for rank in (chief, *evaluators):
        assert rank.wait() == 0, rank.output
    result = [result_of(rank) for rank in evaluators]
    (alone,) = result[0][1]  # from an exporter, which only evaluator 0 calls
    assert [exports for _, exports in result[1:]] == [[], []]
    assert np.sum(alone["confusion"]) == 10_000
    for metrics, _ in result:
        assert set(metrics) == set(alone)
        for name, value in alone.items():
            tolerance = 0 if name in COUNTS else 1e-6
            np.testing.assert_allclose(metrics[name], value, 0, tolerance, err_msg=name)
    # a single writer
    assert evaluated_steps(tmp_path / "model" / "eval", "accuracy").count(20) == 1
    assert len(list((tmp_path / "model" / "eval").glob("events.*"))) == 1


def test_each_evaluator_has_a_different_eval_spec(tmp_path: Path, started: Any) -> None:
    chief, few, everything = started(2, specs="named", metric="largest")
    for rank, count in ((few, 300), (everything, 10_000)):
        assert rank.wait() == 0, rank.output
        metrics, _ = result_of(rank)
        assert np.sum(metrics["confusion"]) == count
    assert chief.wait() == 0, chief.output
    for name in ("few", "all"):
        assert evaluated_steps(tmp_path / "model" / f"eval_{name}", "accuracy")[-1] == 20


def test_a_killed_evaluator_ends_the_others_but_not_the_training(started: Any) -> None:
    chief, first, second, third = started(3, task_settings={"evaluator:1": {"stop": True}})
    second.wait_for_output("stopped here")
    second.signal(signal.SIGKILL)
    for rank in (first, third):
        assert rank.wait() == 200, rank.output
        assert "PeerLostError" in rank.output
        assert "rank 1 (evaluator:1, 127.0.0.1:" in rank.output
    assert chief.wait() == 0, chief.output
