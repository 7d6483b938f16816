"""Trainings with hostopt.tensorflow: as one process on whole batches; and uneven data."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from ranks import Ranks


@pytest.fixture(scope="module", params=["shm", "grpc+tcp"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Variables after the trainings of one process, in "1", and of two ranks, in "2"."""
    directory = tmp_path_factory.mktemp("trainings")
    with Ranks(directory) as ranks:
        for size in (1, 2):
            (directory / str(size)).mkdir()
            environ = {"HOSTOPT_COMMUNICATION": request.param if size > 1 else "auto"}
            arguments = [str(directory / str(size))]
            ranks.run("api_training.py", size, arguments=arguments, environ=environ)
    return directory


def test_two_ranks_equal_one_process(directory: Path) -> None:
    trained = sorted((directory / "1").glob("*-0.npz"))
    assert len(trained) == 12
    for path in trained:
        alone, first = np.load(path), np.load(directory / "2" / path.name)
        second = np.load(directory / "2" / path.name.replace("-0.npz", "-1.npz"))
        for name in alone:
            way = f"{path.stem}: {name}"
            assert np.array_equal(first[name], second[name]), way
            np.testing.assert_allclose(first[name], alone[name], rtol=1e-5, atol=1e-5, err_msg=way)


def test_clipping_and_accumulation_change_the_training(directory: Path) -> None:
    plain = np.load(directory / "1" / "session-0.npz")["kernel"]
    for way in ("session, clipped", "session, two passes"):
        other = np.load(directory / "1" / f"{way}-0.npz")["kernel"]
        assert np.abs(plain - other).max() > 1e-3, way


def test_changed_gradients_are_those_of_all_ranks_or_refused(ranks: Ranks) -> None:
    for rank in ranks.run("api_changed.py", 2):
        outcome = dict(re.findall(r"^(.*, (?:AVERAGE|SUM)): (.*)$", rank.output, re.MULTILINE))
        for op in ("AVERAGE", "SUM"):
            text = "is not reduced over the ranks"
            assert text in outcome.pop(f"of tf.gradients, {op}"), rank.output
        for name in ("with noise", "in Python", "stored"):
            assert "may be reduced already" in outcome.pop(f"{name}, SUM"), rank.output
        assert len(outcome) == 7 and {*outcome.values()} == {"equal"}, rank.output


@pytest.mark.parametrize("communication", ["shm", "grpc+tcp"])
def test_repeated_calls_keep_their_order(ranks: Ranks, communication: str) -> None:
    environ = {"HOSTOPT_COMMUNICATION": communication, "HOSTOPT_COLLECTIVE_TIMEOUT_S": "30"}
    for rank in ranks.run("api_order.py", 2, environ=environ):
        assert "in order" in rank.output


@pytest.mark.parametrize("communication", ["shm", "grpc+tcp"])
def test_ranks_with_uneven_numbers_of_steps(ranks: Ranks, communication: str) -> None:
    environ = {"HOSTOPT_COMMUNICATION": communication, "HOSTOPT_COLLECTIVE_TIMEOUT_S": "60"}
    for rank in ranks.run("api_join.py", 3, environ=environ):
        assert "all ways are equal" in rank.output
        assert "reduces the gradients of late, but rank 0" in rank.output
        assert "has joined before it built them" in rank.output
