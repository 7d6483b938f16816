"""Mailboxes: messages in any order, finish markers, peers that leave, errors and listeners."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from harness import DEADLINE_S, deadline_s

from hostopt.cluster.cluster import Cluster
from hostopt.errors import CollectiveTimeoutError, HostOptError, PeerLostError
from hostopt.options import Options
from hostopt.transport import event_loop, mailbox, stall
from hostopt.transport.mailbox import Listener, Mailbox
from hostopt.transport.message import FINISH_CHANNEL, Tag
from hostopt.transport.stall import Wait

CLUSTER = Cluster.from_dict({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "worker", 0)
TAG = Tag(0, 5, signature=7)
FINISH_MARKER = Tag(FINISH_CHANNEL, 3, bucket=1)


def new_mailbox(**options: Any) -> tuple[Mailbox, list[tuple[Wait, bool]]]:
    stalls: list[tuple[Wait, bool]] = []
    box = Mailbox(
        CLUSTER,
        Options(**options),
        on_stall=lambda wait, has_timed_out: stalls.append((wait, has_timed_out)),
        on_long_wait=lambda wait: None,
    )
    return box, stalls


def take(box: Mailbox, tag: Tag = TAG) -> tuple[Tag, memoryview]:
    return event_loop.run(box.take(1, tag, "bread"))


def test_messages_are_taken_by_tag_in_any_order() -> None:
    box, _ = new_mailbox()
    tags = [TAG._replace(segment=segment) for segment in range(3)]
    for tag in tags:
        box.put(1, tag, memoryview(bytes([tag.segment])))
    for tag in reversed(tags):
        assert take(box, tag) == (tag, bytes([tag.segment]))


def test_a_signature_does_not_select_a_message() -> None:
    box, _ = new_mailbox()
    sent = TAG._replace(signature=8)
    box.put(1, sent, memoryview(b""))
    assert take(box)[0] == sent


def test_a_message_may_arrive_during_the_wait() -> None:
    box, _ = new_mailbox()
    future = event_loop.start(box.take(1, TAG, "bread"))
    while not box.waits():
        pass
    box.put(1, TAG, memoryview(b"flour"))
    assert future.result(30)[1] == b"flour"
    assert box.waits() == []


def test_messages_of_a_peer_that_has_left_can_be_taken_but_no_more() -> None:
    box, _ = new_mailbox()
    box.put(1, TAG, memoryview(b"flour"))
    box.mark_left(1)
    assert box.has_left(1)
    take(box)
    with pytest.raises(PeerLostError, match=r"rank 1 .* is gone .* it has closed") as caught:
        take(box)
    assert (caught.value.rank, caught.value.step) == (1, 5)


def test_a_wait_may_outlast_the_departure_of_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the peer sent by other means, such as MPI, may arrive after its departure."""
    now_s = 0.0
    monkeypatch.setattr(mailbox.time, "monotonic", lambda: now_s)
    box, _ = new_mailbox()
    box.mark_left(1)
    with box.waiting(1, TAG, "bread", grace_s=1.0) as check:
        check()
        now_s = 0.9
        check()
        now_s = 1.1
        with pytest.raises(PeerLostError, match="it has closed its communicator"):
            check()


def test_a_finish_marker_ends_waits_on_other_channels() -> None:
    box, _ = new_mailbox()
    box.put(1, FINISH_MARKER, memoryview(b""))
    with pytest.raises(PeerLostError, match="finished after fewer steps"):
        take(box)
    box.resume(3)
    box.put(1, TAG, memoryview(b"flour"))
    take(box)


def test_finish_markers_count_once_all_streams_have_brought_theirs() -> None:
    box, _ = new_mailbox()
    marker = FINISH_MARKER._replace(chunk=1)  # another stream has one as well
    later = marker._replace(step=marker.step + 1)
    for each in (marker, later, marker):  # those of two streams, which do not wait for each other
        box.put(1, each, memoryview(b""))
    with box.waiting(1, TAG, "bread") as check:
        check()
        box.put(1, later, memoryview(b""))
        with pytest.raises(PeerLostError, match="finished after fewer steps"):
            check()


def test_an_outdated_finish_marker_is_ignored() -> None:
    box, _ = new_mailbox()
    box.resume(3)
    box.put(1, FINISH_MARKER, memoryview(b""))
    with box.waiting(1, TAG, "bread") as check:
        check()


def test_forget_removes_messages_and_notes() -> None:
    box, _ = new_mailbox()
    box.put(1, TAG, memoryview(b"flour"))
    box.mark_left(1)
    box.forget(1)
    assert not box.has_left(1)
    assert not box._messages


def test_the_first_error_ends_all_waits() -> None:
    box, _ = new_mailbox()
    first, second = PeerLostError("first"), PeerLostError("second")
    future = event_loop.start(box.take(1, TAG, "bread"))
    while not box.waits():
        pass
    assert box.fail(first)
    assert not box.fail(second)
    with pytest.raises(PeerLostError, match="first"):
        future.result(30)
    with pytest.raises(PeerLostError, match="first"):
        take(box)


def test_listeners_are_called_once_even_if_one_fails() -> None:
    box, _ = new_mailbox()
    received: list[HostOptError] = []

    def fail(error: HostOptError) -> None:
        raise ValueError("a bug")

    box.on_failure(fail)
    box.on_failure(received.append)
    remove = box.on_failure(received.append)
    remove()
    error = PeerLostError("gone")
    box.fail(error)
    box.fail(error)
    assert received == [error]
    box.on_failure(received.append)  # immediately
    assert received == [error, error]


def test_stalls_are_reported_at_doubled_intervals_and_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now_s=0.0)
    for module in (mailbox, stall):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    box, stalls = new_mailbox(stall_warning_s=1.0, collective_timeout_s=5.0)
    reports = []
    with box.waiting(1, TAG, "bread") as check:
        for clock.now_s in (0.0, 0.9, 1.0, 1.5, 2.0, 3.9, 4.0, 5.0, 6.0):
            assert check() > 0
            reports.append(len(stalls))
        assert reports == [0, 0, 1, 1, 2, 2, 3, 4, 4]
        assert [has_timed_out for _, has_timed_out in stalls] == [False, False, False, True]
        clock.now_s = 10.0
        with pytest.raises(CollectiveTimeoutError, match="is connected but sends nothing"):
            check()


def test_waits_that_begin_later_are_checked_in_time_as_well() -> None:
    box, stalls = new_mailbox(stall_warning_s=0.1, collective_timeout_s=60.0)
    futures = []
    for number in range(4):  # each begins between two checks of those before it
        tag = TAG._replace(segment=number)
        futures.append(event_loop.start(box.take(1, tag, f"loaf {number}")))
        until_s = time.monotonic() + deadline_s(DEADLINE_S)
        while not any(wait.name == f"loaf {number}" for wait, _ in stalls):
            assert time.monotonic() < until_s
            time.sleep(0.001)
    for number, future in enumerate(futures):
        box.put(1, TAG._replace(segment=number), memoryview(b"flour"))
        assert future.result(30)[1] == b"flour"


def test_a_listener_receives_the_messages_of_its_channel_and_departures() -> None:
    box, _ = new_mailbox()
    heard: list[tuple[int, bytes]] = []
    listener = Listener(
        lambda peer, payload: heard.append((peer, bytes(payload))),
        lambda peer: heard.append((peer, b"left")),
    )
    box.put(1, Tag(9, 0), memoryview(b"early"))
    box.put(1, TAG, memoryview(b"flour"))
    box.listen(9, listener)
    box.put(1, Tag(9, 1), memoryview(b"late"))
    box.mark_left(1)
    assert heard == [(1, b"early"), (1, b"late"), (1, b"left")]
    assert take(box)[1] == b"flour"
    box.listen(9, listener)
    assert heard[3:] == [(1, b"left")]
