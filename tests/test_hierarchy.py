"""Ranks that share memory: found, grouped, reduced in two levels, and without it over gRPC."""

from __future__ import annotations

import logging
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import Spawn

from hostopt import communicator as communicator_module
from hostopt import shared_file
from hostopt.communicator import Communicator
from hostopt.compression import new_wire_format
from hostopt.errors import ConfigError
from hostopt.hierarchy import Hierarchy, find_hosts, open_hierarchy
from hostopt.hosts import Hosts, group_by_host, own_host_id
from hostopt.ring import Operation, chunk_slices


def values(rank: int, length: int) -> Any:
    random = np.random.default_rng([rank, length])
    scale = 10.0 ** random.integers(0, 4, length)
    return (random.standard_normal(length) * scale).astype(np.float32)


ROUND = {
    None: lambda array: array,
    "fp16": lambda array: array.astype(np.float16).astype(np.float32),
    "bf16": lambda array: array.astype(ml_dtypes.bfloat16).astype(np.float32),
}


def reference(groups: list[tuple[int, ...]], length: int, compression: str | None) -> Any:
    """The sum as it is defined: in rank order on a host, then around the ring of leaders."""
    on_host = [reduce(np.add, [values(rank, length) for rank in group]) for group in groups]
    if len(groups) == 1:
        return on_host[0]
    travel = ROUND[compression]
    if len(groups) == 2:  # exchanged: both add what both have rounded
        return travel(on_host[0]) + travel(on_host[1])
    result = np.empty(length, np.float32)
    for place, part in enumerate(chunk_slices(length, len(groups))):
        # chunk c travels from leader c + 1 around to leader c, which adds last
        order = [(place + 1 + i) % len(groups) for i in range(len(groups))]
        partial = on_host[order[0]][part]
        for host in order[1:]:
            partial = on_host[host][part] + travel(partial)
        result[part] = travel(partial)
    return result


@pytest.mark.parametrize(
    "groups",
    [
        [(0, 1)],
        [(0, 1, 2), (3,)],
        [(0, 2), (1, 3)],
        [(0,), (1, 2), (3,)],
        [(0, 1), (2, 3), (4, 5), (6, 7)],
        [(0, 1, 2, 3, 4, 5, 6, 7)],
    ],
)
@pytest.mark.parametrize("compression", [None, "fp16", "bf16"])
def test_two_levels_give_the_defined_bits(
    spawn_inproc: Spawn, groups: list[tuple[int, ...]], compression: str | None
) -> None:
    hosts = Hosts(tuple(groups))
    size = sum(map(len, groups))

    def work(communicator: Communicator) -> None:
        hierarchy = open_hierarchy(communicator.duplicate(), hosts, 4096)
        assert hierarchy is not None
        for step, length in enumerate([0, 1, 5, 1024, 1025, 3001]):
            mine = values(communicator.rank, length)
            wire_format = new_wire_format(compression)
            hierarchy.all_reduce(mine, np.add, Operation(7, step), wire_format)
            np.testing.assert_array_equal(mine, reference(groups, length, compression))

    spawn_inproc(size, work, segment_bytes=64)


def test_grouping() -> None:
    assert group_by_host(["a", "b", "a", "", "", "b"]) == Hosts(((0, 2), (1, 5), (3,), (4,)))


def test_leaders_and_members() -> None:
    hosts = Hosts(((0, 2), (1, 3, 4)))
    assert hosts.leaders == (0, 1)
    assert hosts.members(2) == (0, 2)
    assert hosts.members(1) == (1, 3, 4)


def test_processes_of_this_machine_share_a_host() -> None:
    assert own_host_id() == own_host_id() != ""


@pytest.mark.parametrize(
    ("communication", "host_ids", "found"),
    [
        ("auto", ["a", "a"], Hosts(((0, 1),))),
        ("auto", ["a", "b"], None),
        ("auto", ["", ""], None),
        ("auto", ["a", "b", "a"], Hosts(((0, 2), (1,)))),
        ("shm", ["a", "a"], Hosts(((0, 1),))),
        ("grpc", ["a", "a"], None),
    ],
)
def test_what_is_chosen(
    spawn_inproc: Spawn, communication: str, host_ids: list[str], found: Hosts | None
) -> None:
    results = spawn_inproc(
        len(host_ids), lambda c: find_hosts(c, host_ids[c.rank]), communication=communication
    )
    assert results == [found] * len(host_ids)


def test_shared_memory_between_hosts_is_refused(spawn_inproc: Spawn) -> None:
    with pytest.raises(ConfigError, match=r"'shm', but .* \[\(0, 2\), \(1,\)\]: .*Use 'auto'"):
        spawn_inproc(3, lambda c: find_hosts(c, "aba"[c.rank]), communication="shm")


# --- no memory left ---------------------------------------------------------------------------

TOO_MUCH_BYTES = 1 << 50


def test_no_memory_left_means_grpc(
    spawn_inproc: Spawn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(communicator_module, "BLOCK_BYTES", TOO_MUCH_BYTES)
    size, hosts = 3, Hosts(((0, 1, 2),))

    def work(communicator: Communicator) -> int:
        shared = communicator.duplicate()
        shared = Communicator(shared.transport, shared.channel, hosts=hosts)
        wanted = np.full(40_000, 3, np.float32)
        for _ in range(2):
            np.testing.assert_array_equal(shared.all_reduce(np.ones(40_000, np.float32)), wanted)
        return communicator.transport.traffic.payload_bytes

    with caplog.at_level(logging.WARNING):
        sent = spawn_inproc(size, work)
    assert min(sent) > 2 * 4 / 3 * 160_000 - 100
    (message,) = [record.getMessage() for record in caplog.records]
    assert "reducing over gRPC instead: rank 0 (worker:0, inproc:0): /dev/shm gives no" in message
    assert "No space left" in message or "too large" in message
    assert "--shm-size" in message


def test_no_memory_left_is_an_error_where_memory_is_demanded(spawn_inproc: Spawn) -> None:
    def work(communicator: Communicator) -> Hierarchy | None:
        return open_hierarchy(communicator, Hosts(((0, 1),)), TOO_MUCH_BYTES)

    with pytest.raises(ConfigError, match="'shm', but memory cannot be shared: rank 0"):
        spawn_inproc(2, work, communication="shm")


def test_memory_that_another_rank_cannot_see_means_grpc(
    spawn_inproc: Spawn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attach = shared_file.attach
    monkeypatch.setattr(shared_file, "attach", lambda path, nbytes: attach(path + "-x", nbytes))

    def work(communicator: Communicator) -> Hierarchy | None:
        return open_hierarchy(communicator, Hosts(((0, 1),)), 4096)

    assert spawn_inproc(2, work) == [None, None]
    assert "rank 1 (worker:1, inproc:1): /dev/shm/hostopt-" in caplog.text
    assert "cannot be mapped" in caplog.text
