"""Trainings with hostopt.tensorflow: two ranks equal one process on the whole batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ranks import Ranks

WAYS = [
    "session",
    "session, clipped",
    "session, dense",
    "session, predivided",
    "session, two passes",
    "session, some gradients",
    "tape in a function",
    "tape of any shape",
    "eager tape",
    "dense tape",
    "by hand",
    "through the collectives",
]


@pytest.fixture(scope="module", params=["shm", "grpc+tcp"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Variables after the trainings of one process, in "1", and of two ranks, in "2"."""
    directory = tmp_path_factory.mktemp("trainings")
    ranks = Ranks(directory)
    try:
        for size in (1, 2):
            (directory / str(size)).mkdir()
            environ = {"HOSTOPT_COMMUNICATION": request.param if size > 1 else "auto"}
            arguments = [str(directory / str(size))]
            ranks.run("api_training.py", size, arguments=arguments, environ=environ)
    finally:
        ranks.end()
    return directory


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_equal_one_process(directory: Path, way: str) -> None:
    alone = np.load(directory / "1" / f"{way}-0.npz")
    first, second = (np.load(directory / "2" / f"{way}-{rank}.npz") for rank in range(2))
    for name in alone:
        assert np.array_equal(first[name], second[name]), name
        np.testing.assert_allclose(first[name], alone[name], rtol=1e-5, atol=1e-5)


def test_clipping_and_accumulation_change_the_training(directory: Path) -> None:
    plain = np.load(directory / "1" / "session-0.npz")["kernel"]
    for way in ("session, clipped", "session, two passes"):
        other = np.load(directory / "1" / f"{way}-0.npz")["kernel"]
        assert np.abs(plain - other).max() > 1e-3, way


@pytest.mark.parametrize("communication", ["shm", "grpc+tcp"])
def test_repeated_calls_keep_their_order(ranks: Ranks, communication: str) -> None:
    environ = {"HOSTOPT_COMMUNICATION": communication, "HOSTOPT_COLLECTIVE_TIMEOUT_S": "30"}
    for rank in ranks.run("api_order.py", 2, environ=environ):
        assert "in order" in rank.output
