"""Several evaluators: what they measure together, and what they refuse."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import Spawn
from ranks import Rank, Ranks, reserved_addresses

import hostopt
from estimator_ext.evaluators import Evaluators
from estimator_ext.metric_sums import find_summable

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(180)]

COUNTS = ("confusion", "true_positives", "global_step")


@pytest.fixture
def started(tmp_path: Path, ranks: Ranks) -> Iterator[Any]:
    """`started(count, **settings)`: a chief and `count` evaluators, which the cluster lists."""
    with reserved_addresses(4) as addresses:

        def start(count: int, own: dict[str, Any] | None = None, **settings: Any) -> list[Rank]:
            jobs = {"chief": addresses[:1], "evaluator": addresses[1 : 1 + count]}
            arguments = [json.dumps({"model_dir": str(tmp_path / "model"), **settings})]
            more = {name: [json.dumps(value)] for name, value in (own or {}).items()}
            return ranks.start("evaluate.py", jobs, arguments=arguments, own=more)

        yield start


def reported(rank: Rank, word: str) -> Any:
    """What a process reported after `word`."""
    (line,) = [line for line in rank.output.splitlines() if line.startswith(f"{word} ")]
    return json.loads(line[len(word) :])


def evaluated_steps(eval_dir: Path) -> list[int]:
    """Steps for which an evaluation wrote an accuracy, once for each writer."""
    return [
        event.step
        for path in eval_dir.glob("events.*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
        if value.tag == "accuracy"
    ]


@pytest.mark.parametrize("steps", [None, 50])
def test_three_evaluators_measure_what_one_measures(
    tmp_path: Path, started: Any, steps: int | None
) -> None:
    chief, *evaluators = started(3, steps=steps)
    for rank in (chief, *evaluators):
        assert rank.wait() == 0, rank.output
    alone = reported(chief, "ALONE")
    assert np.sum(alone["confusion"]) == (10_000 if steps is None else 5_000)
    for rank in evaluators:
        together, exports = reported(rank, "RESULT")
        assert (set(together), exports) == (set(alone), [])
        for name, value in alone.items():
            tolerance = 0 if name in COUNTS else 1e-6
            np.testing.assert_allclose(together[name], value, tolerance, err_msg=name)
    steps_written = evaluated_steps(tmp_path / "model" / "eval")
    assert steps_written.count(20) == 1
    assert len(list((tmp_path / "model" / "eval").glob("events.*"))) == 1


def test_a_metric_that_cannot_be_summed_is_refused_by_name(started: Any) -> None:
    chief, *evaluators = started(2, metric="largest")
    for rank in evaluators:
        assert rank.wait() == 78, rank.output
        assert "metric 'largest_chance' cannot be summed over several evaluators" in rank.output
        assert "its variable 'largest' changes by AssignVariableOp" in rank.output
    assert chief.wait() == 0, chief.output


def test_each_evaluator_has_an_eval_spec_of_its_own(tmp_path: Path, started: Any) -> None:
    chief, few, everything = started(2, specs="named", metric="largest")
    for rank, count in ((few, 300), (everything, 10_000)):
        assert rank.wait() == 0, rank.output
        metrics, _ = reported(rank, "RESULT")
        assert np.sum(metrics["confusion"]) == count
    assert chief.wait() == 0, chief.output
    for name in ("few", "all"):
        assert evaluated_steps(tmp_path / "model" / f"eval_{name}")[-1] == 20


def test_a_killed_evaluator_ends_the_others_but_not_the_training(started: Any) -> None:
    chief, first, second, third = started(3, own={"evaluator:1": {"stop": True}})
    second.wait_for_output("stopped here")
    second.signal(signal.SIGKILL)
    for rank in (first, third):
        assert rank.wait() == 200, rank.output
        assert "PeerLostError" in rank.output
        assert "rank 1 (evaluator:1, 127.0.0.1:" in rank.output
    assert chief.wait() == 0, chief.output


def test_an_input_fn_that_knows_no_slices_is_refused(started: Any) -> None:
    _, *evaluators = started(2, specs="blind")
    for rank in evaluators:
        assert rank.wait() == 78, rank.output
        assert "has no argument input_context" in rank.output


def test_the_stock_function_refuses_a_second_evaluator(tmp_path: Path, ranks: Ranks) -> None:
    with reserved_addresses(3) as addresses:
        jobs = {"chief": addresses[:1], "evaluator": addresses[1:]}
        settings = json.dumps({"model_dir": str(tmp_path), "specs": "stock"})
        *_, second = ranks.start("evaluate.py", jobs, arguments=[settings])
        assert second.wait() == 1, second.output
    assert "there can only be one `evaluator` task (with task id 0)" in second.output


# -- rounds --------------------------------------------------------------------------------


def test_a_round_in_which_one_finds_the_checkpoint_deleted(
    spawn_inproc: Spawn, tmp_path: Path
) -> None:
    path = str(tmp_path / "model.ckpt-1")

    def run(communicator: hostopt.Communicator) -> list[str | None]:
        evaluators, heard = Evaluators(communicator), []
        if evaluators.index > 0:
            heard.append(evaluators.hear())
        else:
            evaluators.say()  # there is nothing yet
        with (
            pytest.raises(hostopt.CheckpointError, match=r"evaluator:1 did not find .*ckpt-1"),
            evaluators.round(path),
        ):
            if evaluators.index == 1:
                raise tf.errors.NotFoundError(None, None, path)
            evaluators.have_read()
        if evaluators.index > 0:
            heard.append(evaluators.hear())
        else:
            evaluators.say(ended=True)
        return heard

    assert spawn_inproc(3, run) == [[], [path, None], [path, None]]


def test_steps_are_divided(spawn_inproc: Spawn) -> None:
    def run(communicator: hostopt.Communicator) -> tuple[int | None, int | None]:
        evaluators = Evaluators(communicator)
        with pytest.raises(hostopt.ConfigError, match="EvalSpec.steps is 2 for 3 evaluators"):
            evaluators.share(2)
        return evaluators.share(None), evaluators.share(8)

    assert spawn_inproc(3, run) == [(None, 3), (None, 3), (None, 2)]
