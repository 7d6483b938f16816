"""Groups of ranks by host, and the identifier of the local host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hostopt.collectives import hosts as hosts_module
from hostopt.collectives.hosts import Hosts, group_by_host, local_host_id


def test_grouping_in_the_order_of_leaders() -> None:
    assert group_by_host(["a", "b", "a", "", "", "b"]) == Hosts(((0, 2), (1, 5), (3,), (4,)))


def test_leaders_and_members() -> None:
    hosts = Hosts(((0, 2), (1, 3, 4)))
    assert hosts.leaders == (0, 1)
    assert hosts.members(2) == (0, 2)
    assert hosts.members(1) == (1, 3, 4)


def test_processes_of_this_machine_have_the_same_host_id() -> None:
    code = "from hostopt.collectives.hosts import local_host_id; print(local_host_id())"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == local_host_id() != ""


def test_another_architecture_shares_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_module.platform, "machine", lambda: "aarch64")
    assert local_host_id() == ""


def test_without_a_boot_id_no_memory_is_shared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hosts_module, "_BOOT_ID", tmp_path / "none")
    assert local_host_id() == ""


@pytest.mark.parametrize(("groups", "is_single"), [(((0, 1),), True), (((0,), (1,)), False)])
def test_single_host(groups: tuple[tuple[int, ...], ...], is_single: bool) -> None:
    assert Hosts(groups).is_single is is_single
