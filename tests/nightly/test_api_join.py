"""hostopt.tensorflow.join: trainings with an uneven number of steps on each rank."""

from __future__ import annotations

import pytest
from ranks import Ranks


@pytest.mark.parametrize("communication", ["shm", "grpc+tcp"])
def test_ranks_with_uneven_numbers_of_steps(ranks: Ranks, communication: str) -> None:
    environ = {"HOSTOPT_COMMUNICATION": communication, "HOSTOPT_COLLECTIVE_TIMEOUT_S": "60"}
    for rank in ranks.run("api_join.py", 3, environ=environ):
        assert "all ways are equal" in rank.output
        assert "reduces the gradients of late, but rank 0" in rank.output
        assert "has joined before it built them" in rank.output
