"""Waits of all ranks: when they prove that no rank can continue, and when they do not."""

from __future__ import annotations

from typing import Any

import pytest
from clocks import Clock

from hostopt.cluster.cluster import Cluster
from hostopt.transport import event_loop, mismatch
from hostopt.transport.message import Tag
from hostopt.transport.mismatch import DeadlockWatch
from hostopt.transport.stall import Wait

CLUSTER = Cluster.from_dict({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "worker", 0)
LONG_S = 30.0
FLOUR, BREAD = Tag(7, 3), Tag(8, 0)


class Ranks:
    """Two ranks; rank 0 waits for flour and rank 1 for bread, unless a test changes that."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.busy_s = [1.0, 1.0]
        self.sent = False
        self.waits = [[self.wait(1, "flour", FLOUR)], [self.wait(0, "bread", BREAD)]]
        self.calls: list[dict[int, int]] = [{7: 3}, {7: 2, 8: 0}]  # last step by rank and channel
        self.watch = DeadlockWatch(2, LONG_S)

    def wait(self, peer: int, what: str, tag: Tag, for_s: float = 2.0) -> dict[str, Any]:
        return {"peer": peer, "what": what, "tag": list(tag), "for_s": for_s}

    async def request(self, rank: int, waiting: int, tag: Any) -> dict[str, Any]:
        step = self.calls[rank].get(tag[0])
        call = None if step is None else {"step": step, "bucket": 0}
        common = {"error": None, "sends": [], "waits": self.waits[rank]}
        return {**common, "sent": self.sent, "call": call, "busy_s": self.busy_s[rank]}

    def looks(self) -> list[bool]:
        """Looks twice, 2 s apart; returns if each look finds that the ranks cannot continue."""
        found = []
        for _ in range(2):
            error = event_loop.run(self.watch.look(CLUSTER, FLOUR, self.request))
            found.append(error is not None)
            self.clock.advance(2.0)
        return found


@pytest.fixture
def ranks(clock: Clock) -> Ranks:
    clock.govern(mismatch)
    return Ranks(clock)


def test_the_second_look_at_idle_ranks_is_a_proof(ranks: Ranks) -> None:
    assert ranks.looks() == [False, True]


def test_a_rank_that_computes_may_make_the_call_of_the_other(ranks: Ranks) -> None:
    found = []
    for _ in range(3):
        error = event_loop.run(ranks.watch.look(CLUSTER, FLOUR, ranks.request))
        found.append(error is not None)
        ranks.clock.advance(2.0)
        ranks.busy_s[1] += 1.0
    assert found == [False, False, False]
    for waits in ranks.waits:
        waits[0]["for_s"] = LONG_S
    assert event_loop.run(ranks.watch.look(CLUSTER, FLOUR, ranks.request)) is not None


def test_a_rank_that_waits_for_nothing_is_no_part_of_a_deadlock(ranks: Ranks) -> None:
    ranks.waits[1] = []
    assert ranks.looks() == [False, False]


def test_data_on_their_way_end_a_wait(ranks: Ranks) -> None:
    ranks.sent = True
    assert ranks.looks() == [False, False]


def test_a_peer_that_has_made_the_call_has_sent_its_data(ranks: Ranks) -> None:
    ranks.calls[1][7] = 4
    assert ranks.looks() == [False, False]


def test_a_peer_that_is_in_the_call_and_does_not_wait_there_will_send(ranks: Ranks) -> None:
    ranks.calls[1][7] = 3
    assert ranks.looks() == [False, False]


def test_ranks_in_one_call_wait_for_the_network(ranks: Ranks) -> None:
    ranks.calls[1][7] = 3
    ranks.waits[1] = [ranks.wait(0, "flour", FLOUR)]
    assert ranks.looks() == [False, False]


def test_other_waits_than_at_the_last_look(ranks: Ranks) -> None:
    event_loop.run(ranks.watch.look(CLUSTER, FLOUR, ranks.request))
    ranks.waits[0] = [ranks.wait(1, "salt", Tag(9, 0))]
    ranks.calls[0] = {9: 0}
    assert event_loop.run(ranks.watch.look(CLUSTER, FLOUR, ranks.request)) is None


def test_rank_0_looks_when_its_oldest_wait_has_lasted(clock: Clock) -> None:
    clock.govern(mismatch)
    watch, now_s = DeadlockWatch(2, LONG_S), clock.monotonic()
    old, new = Wait(1, FLOUR, "flour", now_s - 2.0), Wait(1, BREAD, "bread", now_s - 1.0)
    assert watch.is_due(0, old, [new, old])
    assert not watch.is_due(0, new, [new, old])
    assert not watch.is_due(0, new, [new])
    assert not watch.is_due(1, old, [old])
