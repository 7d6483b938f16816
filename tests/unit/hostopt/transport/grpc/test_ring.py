"""The state of the peers during the rendezvous, and the documented times."""

from __future__ import annotations

import re

import pytest
from harness import ROOT

from hostopt.cluster.cluster import Cluster
from hostopt.errors import ConfigError
from hostopt.options import Options
from hostopt.transport.grpc.ring import DEFAULT, INCARNATION, Peers, data_hosts

DOCUMENTATION = (ROOT / "docs/wire.md").read_text()
CLUSTER = Cluster.from_dict({"worker": ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]}, "worker", 2)


def test_all_other_ranks_are_missing_at_first() -> None:
    peers = Peers(CLUSTER)
    assert peers.missing == {0, 1}
    assert peers.successor == 0
    assert [rank in peers for rank in range(-1, 4)] == [False, True, True, False, False]


def test_each_start_has_another_incarnation() -> None:
    first, second = Peers(CLUSTER), Peers(CLUSTER)
    assert first.incarnation != second.incarnation
    assert INCARNATION.fullmatch(first.incarnation)
    assert first.origin(2).job == second.origin(2).job
    assert first.origin(2).incarnation == int(first.incarnation, 16)


def test_a_restarted_peer() -> None:
    peers = Peers(CLUSTER)
    assert not peers.is_restarted(1, "77")
    peers.incarnations[1] = "77"
    peers.missing.discard(1)
    assert not peers.is_restarted(1, "77")
    assert peers.is_restarted(1, "78")
    peers.gone.add(1)
    peers.forget(1)
    assert peers.missing == {0, 1}
    assert not peers.gone
    assert not peers.is_restarted(1, "78")


def test_names_and_reasons_of_missing_peers() -> None:
    peers = Peers(CLUSTER)
    peers.reasons[1] = "runs another program"
    assert peers.missing_names() == (
        "worker:0 (127.0.0.1:1), worker:1 (127.0.0.1:2), which runs another program"
    )


# --- interfaces --------------------------------------------------------------------------------


def cluster_at(host: str) -> Cluster:
    return Cluster.from_dict({"worker": [f"{host}:1", "b:2222"]}, "worker", 0)


def test_streams_take_the_interfaces_of_their_peer_in_turn() -> None:
    peers = Peers(cluster_at("192.0.2.7"))
    peers.add(
        1,
        {"incarnation": "9", "data_port": 7, "data_hosts": ["10.0.0.1", "10.1.0.1"]}
        | {"data_streams": 3},
    )
    addresses = [peers.data_address(1, stream) for stream in range(3)]
    assert addresses == ["10.0.0.1:7", "10.1.0.1:7", "10.0.0.1:7"]


def test_a_peer_without_interfaces_is_reached_at_its_address() -> None:
    peers = Peers(cluster_at("192.0.2.7"))
    peers.add(1, {"incarnation": "9", "data_port": 7, "data_hosts": [], "data_streams": 1})
    assert peers.data_address(1, 0) == "b:7"


def test_the_addresses_of_interfaces() -> None:
    assert data_hosts(cluster_at("192.0.2.7"), Options(interfaces="lo,lo")) == [
        "127.0.0.1",
        "127.0.0.1",
    ]
    assert data_hosts(cluster_at("192.0.2.7"), Options()) == []


def test_a_rank_that_only_its_own_host_reaches_ignores_interfaces() -> None:
    assert data_hosts(cluster_at("127.0.0.1"), Options(interfaces="missing")) == []


def test_an_interface_that_the_host_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"names 'missing', .*, only .*\blo\b.*\. Name"):
        data_hosts(cluster_at("192.0.2.7"), Options(interfaces="lo,missing"))


# --- times -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "times_s"),
    [
        ("one `Hello` call", [DEFAULT.hello_timeout_s]),
        ("warning that names the missing ranks", [DEFAULT.progress_every_s]),
        ("the answer to `Status`", [DEFAULT.status_timeout_s]),
        ("goodbye", [DEFAULT.leave_timeout_s]),
        ("ping to a silent peer", [DEFAULT.keepalive_s, DEFAULT.ping_timeout_s]),
    ],
)
def test_deadlines(event: str, times_s: list[float]) -> None:
    row = re.search(rf"^\| {event}[^|]*\|([^|]*)\|", DOCUMENTATION, re.MULTILINE)
    assert row is not None
    assert [float(number) for number in re.findall(r"[\d.]+", row[1])] == times_s


def test_time_that_a_rank_stays_after_an_auth_error() -> None:
    assert f"answers for {DEFAULT.auth_linger_s:g} s more" in " ".join(DOCUMENTATION.split())
