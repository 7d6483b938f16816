"""Events of a task on a node, and those that are lost on their way."""

from __future__ import annotations

import threading

from harness import until

from hostopt.launch.ray_events import ERR, OUT, Event, EventQueue


def test_events_come_again_until_they_are_confirmed() -> None:
    queue = EventQueue()
    queue.put(OUT, b"1")
    queue.put(ERR, b"2")
    assert queue.get(0, 0.0) == [Event(OUT, b"1"), Event(ERR, b"2")]
    assert queue.get(0, 0.0) == [Event(OUT, b"1"), Event(ERR, b"2")]
    assert queue.get(1, 0.0) == [Event(ERR, b"2")]
    assert queue.get(2, 0.0) == []
    queue.put(OUT, b"3")
    assert queue.get(2, 0.0) == [Event(OUT, b"3")]


def test_a_call_waits_for_an_event() -> None:
    queue = EventQueue()
    results: list[list[Event]] = []
    caller = threading.Thread(target=lambda: results.append(queue.get(0, 60.0)), daemon=True)
    caller.start()
    queue.put(OUT, b"late")
    caller.join(60.0)
    assert results == [[Event(OUT, b"late")]]


def test_large_events_come_one_by_one() -> None:
    queue = EventQueue()
    large = bytes(70 << 10)
    for _ in range(3):
        queue.put(OUT, large)
    for seen in range(3):
        assert queue.get(seen, 0.0) == [Event(OUT, large)]


def test_a_task_waits_for_a_launcher_that_does_not_keep_up() -> None:
    queue = EventQueue()
    chunk, count = bytes(64 << 10), 200  # 12.5 MiB

    def put_all() -> None:
        for _ in range(count):
            queue.put(OUT, chunk)

    writer = threading.Thread(target=put_all, daemon=True)
    writer.start()
    until(lambda: len(queue._events) == 64, "a full queue")
    assert writer.is_alive()
    seen = 0
    while seen < count:
        seen += len(queue.get(seen, 60.0))
    writer.join(60.0)
    assert seen == count and not writer.is_alive()
