"""Faults of links between hosts: each rank is in a network namespace behind a switch."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_ring import FaultRing, assert_exact, report
from harness import ROOT
from rings import RankProcess, RankProcesses

from hostopt.transport.grpc import ring as grpc_ring

sys.path.insert(0, str(ROOT))

from benchmarks.network import (
    ADDRESSES,
    INTERFACE,
    SECOND_INTERFACE,
    Link,
    bridged,
    do,
    joined,
    limit_rate,
)

pytestmark = pytest.mark.usefixtures("no_thread_left")

VICTIM = 1
WITHIN_S = 5.0 + 6.0  # for an error, and for the end of the process


class Hosts:
    """A ring of three ranks, each on its own host.

    Args:
      namespaces: namespaces by address.
      directory: where the output of the ranks goes.
      communication: the option of all ranks.
      streams: the option of all ranks.
    """

    def __init__(
        self, namespaces: dict[str, str], directory: Path, communication: str, streams: str
    ) -> None:
        self._options = {"HOSTOPT_COMMUNICATION": communication, "HOSTOPT_STREAMS": streams}
        self.ips = [*namespaces]
        self.victim = namespaces[self.ips[VICTIM]]
        self.processes = RankProcesses(
            [f"{ip}:2222" for ip in namespaces],
            directory,
            [["ip", "netns", "exec", name] for name in namespaces.values()],
        )

    def start(self, *arguments: object, **environ: str) -> list[RankProcess]:
        """Starts all ranks; each waits for permission to continue after step 3."""
        environ = {
            "HOSTOPT_TOKEN": "of this test",
            **self._options,
            **environ,
        }
        started = FaultRing(self.processes, **environ).start_all("--ask-after", 3, *arguments)
        for process in started:
            process.expect("continue?")
        return started

    def set_link(self, state: str) -> None:
        """Sets the victim's link ``up`` or ``down``."""
        do(f"ip -n {self.victim} link set {INTERFACE} {state}")


@pytest.fixture(params=[("grpc", "1"), ("grpc+tcp", "1"), ("grpc+tcp", "3")], ids="-".join)
def hosts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with bridged(3) as namespaces:
        hosts = Hosts(namespaces, tmp_path, *request.param)
        try:
            yield hosts
        finally:
            left = hosts.processes.end()
        assert not left


def resume(started: list[RankProcess]) -> None:
    for process in started:
        process.write_line("continue")


def test_healthy_links_raise_no_error(hosts: Hosts) -> None:
    started = hosts.start("--pause-s", 0.3)
    resume(started)
    for process in started:
        assert_exact(process)
        assert not process.stderr


def test_a_broken_link_is_an_error_on_both_sides(hosts: Hosts) -> None:
    started = hosts.start(HOSTOPT_COLLECTIVE_TIMEOUT_S="20")
    hosts.set_link("down")
    resume(started)
    assert [process.exit_code(WITHIN_S) for process in started] == [200, 200, 200]
    errors = [report(process)["error"] for process in started]
    lost = [error["facts"]["rank"] for error in errors]
    assert lost[0] == lost[2] == VICTIM, errors
    assert lost[VICTIM] != VICTIM, errors
    assert errors[0]["facts"]["root_cause"] == errors[2]["facts"]["root_cause"]


def test_a_link_that_is_down_for_a_second(hosts: Hosts) -> None:
    started = hosts.start()
    hosts.set_link("down")
    resume(started)
    time.sleep(1.0)  # the fault itself
    hosts.set_link("up")
    for process in started:
        assert_exact(process)


def test_a_link_broken_in_one_direction(hosts: Hosts) -> None:
    started = hosts.start(HOSTOPT_COLLECTIVE_TIMEOUT_S="20")
    do(f"ip -n {hosts.victim} route add blackhole {hosts.ips[0]}/32")
    resume(started)
    assert [process.exit_code(WITHIN_S) for process in started] == [200, 200, 200]
    for process in started:
        error = report(process)["error"]
        assert error["facts"]["rank"] in (0, VICTIM), error  # the ends of the broken way


def test_a_slow_link_raises_no_error(hosts: Hosts) -> None:
    # 110 kB in a message; a ping waits behind it, and has its default time
    arguments = ("--steps", 4, "--length", 40_000, "--ping-s", grpc_ring.DEFAULT.ping_timeout_s)
    environ = {"HOSTOPT_SEGMENT_BYTES": "2097152", "HOSTOPT_STALL_WARNING_S": "0.5"}
    started = hosts.start(*arguments, **environ)
    limit_rate(hosts.victim, 1e6, "16kb")  # bit/s: a message takes 0.9 s
    resume(started)
    for process in started:
        assert_exact(process, steps=4)
    warnings = "".join(process.stderr for process in started)
    assert f"{hosts.processes.name(VICTIM)} is sending it: the link from rank {VICTIM}" in warnings


def test_a_ping_delayed_by_a_long_message_raises_no_error(hosts: Hosts) -> None:
    environ = {"HOSTOPT_SEGMENT_BYTES": "2097152", "HOSTOPT_COLLECTIVE_TIMEOUT_S": "20"}
    started = hosts.start("--steps", 4, "--length", 60_000, **environ)
    limit_rate(hosts.victim, 5e5, "16kb")  # bit/s: a message takes 2.6 s, a ping has 2 s
    resume(started)
    for process in started:
        assert_exact(process, steps=4)


# --- two lines between two hosts ---------------------------------------------------------------


@pytest.fixture
def two_lines() -> Iterator[Link]:
    with joined(lines=2) as link:
        yield link


@pytest.fixture
def on_two_lines(two_lines: Link, tmp_path: Path) -> Iterator[RankProcesses]:
    processes = RankProcesses(
        [f"{ip}:2222" for ip in ADDRESSES],
        tmp_path,
        [["ip", "netns", "exec", name] for name in two_lines.namespaces],
    )
    try:
        yield processes
    finally:
        left = processes.end()
    assert not left


def start_on_both(processes: RankProcesses) -> list[RankProcess]:
    return FaultRing(
        processes,
        HOSTOPT_TOKEN="of this test",
        HOSTOPT_COMMUNICATION="grpc+tcp",
        HOSTOPT_INTERFACES=f"{INTERFACE},{SECOND_INTERFACE}",
    ).start_all("--steps", 4, "--length", 1_000_000)


def sent_bytes(namespace: str, interface: str) -> int:
    counter = f"/sys/class/net/{interface}/statistics/tx_bytes"
    command = ["ip", "netns", "exec", namespace, "cat", counter]
    return int(subprocess.run(command, check=True, capture_output=True).stdout)


def test_data_travels_on_both_lines(two_lines: Link, on_two_lines: RankProcesses) -> None:
    for process in start_on_both(on_two_lines):
        assert_exact(process, steps=4)
        assert not process.stderr
    for namespace in two_lines.namespaces:
        sent = [sent_bytes(namespace, each) for each in (INTERFACE, SECOND_INTERFACE)]
        assert min(sent) > 0.4 * sum(sent), sent


def test_a_line_that_is_down_leaves_its_data_to_the_other(
    two_lines: Link, on_two_lines: RankProcesses
) -> None:
    do(f"ip -n {two_lines.namespaces[1]} link set {SECOND_INTERFACE} down")
    for process in start_on_both(on_two_lines):
        assert_exact(process, steps=4)
        assert "Data goes over fewer streams" in process.stderr
