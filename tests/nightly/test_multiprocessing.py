"""Programs that set TF_CONFIG themselves and start their workers with `multiprocessing`."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from harness import reserved_addresses
from ranks import Ranks


def run(ranks: Ranks, fresh: bool = False, **settings: Any) -> str:
    """Returns the output of a program and its two workers.

    Args:
      ranks: starts the program.
      fresh: starts a new interpreter; others have imported hostopt already.
      **settings: those of `children.py`.
    """
    with reserved_addresses(2) as addresses:
        (parent,) = ranks.start(
            "children.py",
            {"worker": addresses},
            arguments=[json.dumps(settings)],
            tasks=[("worker", 0)],
            fresh=fresh,
        )
        assert parent.wait() == 0, parent.output
    return parent.output


@pytest.mark.parametrize(
    ("worker", "method", "daemon"),
    [
        ("train_estimator", "fork", False),
        ("train_function", "fork", True),
        ("train_function", "spawn", False),
        ("train_estimator", "spawn", True),
    ],
)
def test_workers_train_and_agree(ranks: Ranks, method: str, worker: str, daemon: bool) -> None:
    output = run(ranks, method=method, worker=worker, daemon=daemon)
    assert "EXIT CODES [0, 0]" in output, output
    first, second = re.findall("WEIGHT (.+)", output)
    assert first == second


@pytest.mark.parametrize(
    ("worker", "before", "used"),
    [
        ("train_function", "operation", "TensorFlow"),
        ("train_function", "session", "TensorFlow"),
        ("train_function", "init", "a hostopt ring"),
        ("train_estimator", "operation", "TensorFlow"),
    ],
)
def test_a_fork_after_the_first_use_is_refused(
    ranks: Ranks, worker: str, before: str, used: str
) -> None:
    output = run(ranks, method="fork", worker=worker, before=before)
    assert "EXIT CODES [1, 1]" in output, output
    errors = re.findall("ConfigError: (.+)", output)
    assert len(errors) == 2, output
    for error in errors:
        assert f"was forked from one that had already used {used}, and its threads" in error
        assert 'multiprocessing.get_context("spawn")' in error


def test_a_worker_that_imports_hostopt_after_the_fork_is_refused(ranks: Ranks) -> None:
    output = run(ranks, True, method="fork", worker="train_function", before="operation")
    assert output.count("had already used TensorFlow") == 2, output


@pytest.mark.parametrize("before", ["session", "init"])
def test_spawned_workers_do_not_depend_on_their_parent(ranks: Ranks, before: str) -> None:
    output = run(ranks, method="spawn", worker="train_function", before=before)
    assert "EXIT CODES [0, 0]" in output, output
    assert output.count(" of 2\n") == 2, output


def test_a_worker_without_tf_config_is_alone(ranks: Ranks) -> None:
    output = run(ranks, method="spawn", worker="lose_tf_config", before="init")
    assert output.count("ALONE 1\n") == 2, output


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_returns_leaves_in_good_order(ranks: Ranks, method: str) -> None:
    output = run(ranks, method=method, worker="return_early")
    assert "EXIT CODES [1, 0]" in output, output
    assert re.search("PeerLostError: rank 1 .*(has left|has closed its communicator)", output), (
        output
    )
    assert "process gone" not in output, output


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_others_learn_the_exception_of_a_worker(ranks: Ranks, method: str) -> None:
    output = run(ranks, method=method, worker="fail")
    assert "EXIT CODES [1, 1]" in output, output
    assert re.search("PeerLostError: rank 1 .*ZeroDivisionError: of rank 1", output), output
