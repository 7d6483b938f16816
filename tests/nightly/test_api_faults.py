"""Calls of hostopt.tensorflow that fail: the other ranks learn of it, and messages name it."""

from __future__ import annotations

import signal

import pytest
from harness import reserved_addresses
from ranks import Rank, Ranks

MODES = ["eager", "function", "graph"]


def start(ranks: Ranks, fault: str, mode: str, **environ: str) -> list[Rank]:
    environ = {"HOSTOPT_COLLECTIVE_TIMEOUT_S": "60", **environ}
    with reserved_addresses(2) as addresses:
        jobs = {"worker": addresses}
        return ranks.start("api_faults.py", jobs, arguments=[fault, mode], environ=environ)


def check_failed(started: list[Rank], *texts: str) -> None:
    """Checks that all ranks fail, and name the ranks and these texts."""
    for rank in started:
        assert rank.wait() != 0, rank.output
        for text in ["rank 0", "rank 1", *texts]:
            assert text in rank.output, rank.output


DIFFERENCES = {
    "op": ["all_reduce(sum)", "all_reduce(max)"],
    "dtype": ["float32[2]", "float64[2]"],
    "shape": ["float32[2]", "float32[3]"],
    "root_rank": ["broadcast from rank 0", "broadcast from rank 1"],
}


@pytest.mark.parametrize(
    ("fault", "communication", "mode"),
    [
        *[(fault, "shm", "eager") for fault in DIFFERENCES],
        *[(fault, "grpc+tcp", "eager") for fault in DIFFERENCES],
        ("op", "shm", "function"),
        ("shape", "grpc+tcp", "graph"),
    ],
)
def test_calls_that_differ_name_both_ranks_and_values(
    ranks: Ranks, fault: str, communication: str, mode: str
) -> None:
    started = start(ranks, fault, mode, HOSTOPT_COMMUNICATION=communication)
    check_failed(started, "RAISED", "'x'", *DIFFERENCES[fault])
    for rank in started if mode == "eager" else []:
        for kind in ("CollectiveMismatchError", "FailedPreconditionError"):
            assert f"{kind}: True" in rank.output, rank.output


@pytest.mark.parametrize("communication", ["shm", "grpc+tcp"])
@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_wait_for_each_other(ranks: Ranks, mode: str, communication: str) -> None:
    started = start(
        *(ranks, "names", mode),
        HOSTOPT_COMMUNICATION=communication,
        HOSTOPT_COLLECTIVE_TIMEOUT_S="600",
    )
    check_failed(started, "x of 0", "x of 1", "none of them can continue")


@pytest.mark.parametrize("communication", ["shm", "grpc+tcp"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("fault", "call", "reason"),
    [
        ("refused", "x", "op is Adasum"),
        ("refused gradients", "gradients of x", "'source 0' is of dtype complex64"),
    ],
)
def test_a_call_that_one_rank_refuses(
    ranks: Ranks, fault: str, call: str, reason: str, mode: str, communication: str
) -> None:
    """Rank 1 waits until rank 0 has failed, as a program may catch the error."""
    first, second = start(
        *(ranks, fault, mode),
        HOSTOPT_COMMUNICATION=communication,
        HOSTOPT_COLLECTIVE_TIMEOUT_S="600",
    )
    assert first.wait(60) != 0
    assert f"has refused the call {call!r}: {reason}" in first.output, first.output
    assert "rank 1" in first.output
    second.signal(signal.SIGTERM)
    assert f"RAISED ConfigError: {reason}" in second.output, second.output


@pytest.mark.parametrize(
    ("fault", "texts"),
    [
        ("gradients", ["[2, 3]", "[3, 3]"]),
        ("variables", ["[2, 3]", "[3, 3]"]),
        ("op of gradients", ["CollectiveMismatchError", "op=average", "op=sum"]),
    ],
)
def test_variables_that_differ_name_both_ranks_and_values(
    ranks: Ranks, fault: str, texts: list[str]
) -> None:
    check_failed(start(ranks, fault, "eager"), *texts)


@pytest.mark.parametrize(
    ("communication", "mode"),
    [("shm", "eager"), ("grpc", "eager"), ("grpc+tcp", "function"), ("shm", "graph")],
)
@pytest.mark.parametrize("fault", ["die", "leave"])
def test_a_rank_that_ends_in_a_collective_is_named(
    ranks: Ranks, fault: str, communication: str, mode: str
) -> None:
    first, second = start(ranks, fault, mode, HOSTOPT_COMMUNICATION=communication)
    assert second.wait() == (-signal.SIGKILL if fault == "die" else 0)
    assert first.wait(30) != 0
    assert "PeerLostError: rank 1 (worker:1" in first.output, first.output


@pytest.mark.parametrize("mode", MODES)
def test_a_tensor_that_a_rank_never_submits(ranks: Ranks, mode: str) -> None:
    first, second = start(ranks, "omit", mode, HOSTOPT_STALL_WARNING_S="1")
    first.wait_for_output("is in no collective")
    line = next(line for line in first.output.splitlines() if "is in no collective" in line)
    for text in ["rank 0 has waited", "'x'", "rank 1 (worker:1"]:
        assert text in line, line
    second.signal(signal.SIGKILL)
    assert second.wait() == -signal.SIGKILL
    assert first.wait(30) != 0
