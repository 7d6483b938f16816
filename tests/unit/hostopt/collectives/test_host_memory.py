"""Which ranks share memory, and what happens if memory cannot be shared."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from rings import Spawn

from hostopt.collectives import host_memory, shared_file
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.host_memory import (
    HierarchicalAllReduce,
    HostMemory,
    find_hosts,
)
from hostopt.collectives.hosts import Hosts
from hostopt.errors import ConfigError

TOO_MUCH_BYTES = 1 << 50


@pytest.mark.parametrize(
    ("communication", "host_ids", "result"),
    [
        ("auto", ["a", "a"], Hosts(((0, 1),))),
        ("auto", ["a", "b"], None),
        ("auto", ["", ""], None),
        ("auto", ["a", "b", "a"], Hosts(((0, 2), (1,)))),
        ("shm", ["a", "a"], Hosts(((0, 1),))),
        ("grpc", ["a", "a"], None),
    ],
)
def test_hosts_by_option(
    spawn_inproc: Spawn, communication: str, host_ids: list[str], result: Hosts | None
) -> None:
    results = spawn_inproc(
        len(host_ids), lambda c: find_hosts(c, host_ids[c.rank]), communication=communication
    )
    assert results == [result] * len(host_ids)


def test_shm_between_hosts_is_an_error(spawn_inproc: Spawn) -> None:
    with pytest.raises(ConfigError, match=r"'shm', but .* \[\(0, 2\), \(1,\)\]: .*Use 'auto'"):
        spawn_inproc(3, lambda c: find_hosts(c, "aba"[c.rank]), communication="shm")


def test_without_free_memory_grpc_is_used(
    spawn_inproc: Spawn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_memory, "BLOCK_BYTES", TOO_MUCH_BYTES)
    size, hosts = 3, Hosts(((0, 1, 2),))

    def work(communicator: Communicator) -> int:
        shared = communicator.duplicate()
        shared = Communicator(shared.transport, shared.channel, hosts=hosts)
        expected = np.full(40_000, 3, np.float32)
        for _ in range(2):
            np.testing.assert_array_equal(shared.all_reduce(np.ones(40_000, np.float32)), expected)
        return communicator.transport.traffic.payload_bytes

    with caplog.at_level(logging.WARNING):
        sent = spawn_inproc(size, work)
    assert min(sent) > 2 * 4 / 3 * 160_000 - 100
    (message,) = [record.getMessage() for record in caplog.records]
    assert (
        "reducing over the network instead: rank 0 (worker:0, inproc:0): /dev/shm has no"
        in message
    )
    assert "No space left" in message or "too large" in message
    assert "--shm-size" in message


def test_without_free_memory_shm_is_an_error(
    spawn_inproc: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "BLOCK_BYTES", TOO_MUCH_BYTES)

    def work(communicator: Communicator) -> HierarchicalAllReduce | None:
        return HostMemory(communicator, Hosts(((0, 1),))).hierarchical(TOO_MUCH_BYTES)

    with pytest.raises(ConfigError, match="'shm', but memory cannot be shared: rank 0"):
        spawn_inproc(2, work, communication="shm")


def test_memory_that_a_rank_cannot_map_is_not_used(
    spawn_inproc: Spawn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attach = shared_file.attach
    monkeypatch.setattr(shared_file, "attach", lambda path, nbytes: attach(path + "-x", nbytes))

    def work(communicator: Communicator) -> HierarchicalAllReduce | None:
        return HostMemory(communicator, Hosts(((0, 1),))).hierarchical(4096)

    assert spawn_inproc(2, work) == [None, None]
    assert "rank 1 (worker:1, inproc:1): /dev/shm/hostopt-" in caplog.text
    assert "cannot be mapped" in caplog.text


def test_allocated_memory_is_shared(spawn_inproc: Spawn) -> None:
    def work(communicator: Communicator) -> bytes:
        memory = HostMemory(communicator.duplicate(), Hosts(((0, 1),))).allocate(4096)
        assert memory is not None
        assert not any(memory)
        communicator.barrier()
        memory[communicator.rank] = communicator.rank + 1
        communicator.barrier()
        return bytes(memory[:3])

    assert spawn_inproc(2, work) == [b"\1\2\0"] * 2


def test_ranks_of_several_hosts_have_no_channel_of_all(spawn_inproc: Spawn) -> None:
    def work(communicator: Communicator) -> bool:
        memory = HostMemory(communicator.duplicate(), Hosts(((0, 1), (2,))))
        assert memory.hierarchical(8) is not None
        return memory.channel_of_all(8) is None

    assert all(spawn_inproc(3, work))
