"""Faults of links between hosts: each rank in a network namespace, all joined by a switch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, RankProcess, RankProcesses
from fault_ring import FaultRing, assert_exact, report

from hostopt.transport import grpc_parts

sys.path.insert(0, str(ROOT))

from benchmarks.network import INTERFACE, bridged, do, limit_rate

pytestmark = [
    pytest.mark.netns,
    pytest.mark.timeout(90),
    pytest.mark.usefixtures("no_thread_left"),
]

VICTIM = 1
WITHIN_S = 5.0 + 6.0  # for an error, and for the end of the process


class Hosts:
    """A ring of three ranks, each on a host of its own.

    Args:
      namespaces: namespaces by address.
      directory: where the output of the ranks goes.
    """

    def __init__(self, namespaces: dict[str, str], directory: Path) -> None:
        self.ips = [*namespaces]
        self.victim = namespaces[self.ips[VICTIM]]
        self.processes = RankProcesses(
            [f"{ip}:2222" for ip in namespaces],
            directory,
            [["ip", "netns", "exec", name] for name in namespaces.values()],
        )

    def start(self, *arguments: object, **environ: str) -> list[RankProcess]:
        """Start all ranks; each asks after step 3 whether to go on."""
        environ = {"HOSTOPT_TOKEN": "of this test", **environ}
        started = FaultRing(self.processes, **environ).start_all("--ask-after", 3, *arguments)
        for process in started:
            process.expect("go on?")
        return started

    def set_link(self, state: str) -> None:
        """Set the victim's link ``up`` or ``down``."""
        do(f"ip -n {self.victim} link set {INTERFACE} {state}")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with bridged(3) as namespaces:
        hosts = Hosts(namespaces, tmp_path)
        try:
            yield hosts
        finally:
            left = hosts.processes.end()
        assert not left


def go_on(started: list[RankProcess]) -> None:
    for process in started:
        process.tell("go on")


def test_no_alarm_where_all_links_are_well(hosts: Hosts) -> None:
    started = hosts.start("--pause-s", 0.3)
    go_on(started)
    for process in started:
        assert_exact(process)
        assert not process.stderr


def test_a_link_that_breaks_is_an_error_on_both_sides(hosts: Hosts) -> None:
    started = hosts.start(HOSTOPT_COLLECTIVE_TIMEOUT_S="20")
    hosts.set_link("down")
    go_on(started)
    assert [process.exit_code(WITHIN_S) for process in started] == [200, 200, 200]
    errors = [report(process)["error"] for process in started]
    lost = [error["facts"]["rank"] for error in errors]
    assert lost[0] == lost[2] == VICTIM, errors
    assert lost[VICTIM] != VICTIM, errors
    assert errors[0]["facts"]["root_cause"] == errors[2]["facts"]["root_cause"]


def test_a_link_that_is_down_for_a_second(hosts: Hosts) -> None:
    started = hosts.start()
    hosts.set_link("down")
    go_on(started)
    time.sleep(1.0)  # the fault itself
    hosts.set_link("up")
    for process in started:
        assert_exact(process)


def test_a_link_that_is_broken_one_way(hosts: Hosts) -> None:
    started = hosts.start(HOSTOPT_COLLECTIVE_TIMEOUT_S="20")
    do(f"ip -n {hosts.victim} route add blackhole {hosts.ips[0]}/32")
    go_on(started)
    assert [process.exit_code(WITHIN_S) for process in started] == [200, 200, 200]
    for process in started:
        error = report(process)["error"]
        assert error["facts"]["rank"] in (0, VICTIM), error  # the ends of the broken way


def test_a_slow_link_is_no_error(hosts: Hosts) -> None:
    # 110 kB in a message; a ping waits behind it, and has its default time
    arguments = ("--steps", 4, "--length", 40_000, "--ping-s", grpc_parts.PING_TIMEOUT_S)
    environ = {"HOSTOPT_SEGMENT_BYTES": "2097152", "HOSTOPT_STALL_WARNING_S": "0.5"}
    started = hosts.start(*arguments, **environ)
    limit_rate(hosts.victim, 1e6, "16kb")  # bit/s: a message takes 0.9 s
    go_on(started)
    for process in started:
        assert_exact(process, steps=4)
    warnings = "".join(process.stderr for process in started)
    assert f"{hosts.processes.name(VICTIM)} is sending it: the link from rank {VICTIM}" in warnings


def test_a_ping_that_waits_behind_a_long_message_is_no_error(hosts: Hosts) -> None:
    environ = {"HOSTOPT_SEGMENT_BYTES": "2097152", "HOSTOPT_COLLECTIVE_TIMEOUT_S": "20"}
    started = hosts.start("--steps", 4, "--length", 60_000, **environ)
    limit_rate(hosts.victim, 5e5, "16kb")  # bit/s: a message takes 2.6 s, a ping has 2 s
    go_on(started)
    for process in started:
        assert_exact(process, steps=4)
