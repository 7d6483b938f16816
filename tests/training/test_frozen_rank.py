"""A rank that is frozen is named by all others, long before a collective would time out."""

from __future__ import annotations

from fault_ring import PING_S, VICTIM, FaultRing, assert_all_blame, end, others
from faults import FaultPlan
from rings import NewRing


def test_a_frozen_rank_is_detected_by_ping(processes: NewRing) -> None:
    plan = FaultPlan(VICTIM, step=3, point="mid-chunk", action="stop")
    ring = processes(3)
    started = FaultRing(
        ring, plan, HOSTOPT_COMMUNICATION="grpc+tcp", HOSTOPT_COLLECTIVE_TIMEOUT_S="60"
    ).start_all()
    for result in assert_all_blame(ring, others(started), "PeerLostError", within_s=5.0):
        assert result["waited_s"] >= PING_S
        assert "no answer to ping, its process is frozen" in result["error"]["message"]
    end(started[VICTIM])
