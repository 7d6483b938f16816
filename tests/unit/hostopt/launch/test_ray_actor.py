"""The actor that runs tasks on a node, without Ray."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest
from harness import python, until

from hostopt.launch import ray_task
from hostopt.launch.ray_task import ERR, OUT, Event, EventQueue, Job, TaskActor, environment_of
from hostopt.options import RING_ENDED
from hostopt.process import error_report
from hostopt.telemetry import progress
from hostopt.versions import has_keras_3

SETTINGS = dict.fromkeys((error_report.VARIABLE, progress.VARIABLE), "/launcher/only")


def job(code: str, number: int = 1, **settings: str) -> Job:
    everything = {**SETTINGS, **settings}
    return Job(number, python(code), ("worker", 0), everything, os.environ, os.getcwd(), 1)


def run(actor: TaskActor, task: Job) -> list[Event]:
    """Runs a task, and returns its events; output of a kind is joined."""
    actor.start(task)
    return finish(actor, task)


def finish(actor: TaskActor, task: Job) -> list[Event]:
    events: list[Event] = []
    while not events or events[-1].kind != ray_task.END:
        events += actor.events(task.number, len(events))
    return events


def data_of(events: list[Event], kind: str) -> bytes:
    return b"".join(event.data for event in events if event.kind == kind)


@pytest.fixture
def actor() -> TaskActor:
    return TaskActor("127.0.0.1", "0123456789")


def test_a_place_holds_a_port(actor: TaskActor) -> None:
    opened = actor.open()
    assert opened.node == "127.0.0.1 (01234567)"
    host, _, port = opened.address.rpartition(":")
    with socket.socket() as server:  # as a server that names the port
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, int(port)))
        server.listen()


def test_output_files_and_exit_code_become_events(actor: TaskActor) -> None:
    code = """
        import os, sys
        from hostopt import errors
        from hostopt.process import error_report
        from hostopt.telemetry.progress import write_progress
        write_progress("training", {"step": 3})
        error_report.write_report(errors.ConfigError("unusable. Correct it"), 78, None)
        print("out")
        print("err", file=sys.stderr)
        sys.exit(78)
    """
    events = run(actor, job(code))
    assert data_of(events, ray_task.OUT) == b"out\n"
    assert data_of(events, ray_task.ERR) == b"err\n"
    progresses = [event.data for event in events if event.kind == ray_task.PROGRESS]
    assert progresses[-1] == b'{"training": {"step": 3}}'
    assert data_of(events, ray_task.REPORT) == b"78\nConfigError: unusable. Correct it"
    assert data_of(events, ray_task.CODE) == b"78"


def test_signals_reach_the_task_although_the_thread_blocks_them(actor: TaskActor) -> None:
    code = """
        import signal, sys, time
        signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
        print("ready", flush=True)
        while True:  # a signal just before a long sleep would wait for its end
            time.sleep(0.01)
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        task = job(code)
        actor.start(task)
        while not data_of(actor.events(1, 0), ray_task.OUT):
            pass
        actor.signal(1, [signal.SIGINT])
        assert data_of(finish(actor, task), ray_task.CODE) == b"7"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def test_a_signal_for_an_earlier_task_does_not_reach_the_next_one(actor: TaskActor) -> None:
    assert data_of(run(actor, job("pass")), ray_task.CODE) == b"0"
    code = "import os, time\nwhile not os.path.exists(os.environ['HOSTOPT_RING_ENDED']): pass"
    task = job(code, 2, **{RING_ENDED: "/launcher/only"})
    actor.start(task)
    actor.signal(1, [signal.SIGKILL])
    actor.end_ring()
    assert data_of(finish(actor, task), ray_task.CODE) == b"0"
    assert actor.events(1, 0) == [Event(ray_task.END, b"")]


def test_a_missing_script(actor: TaskActor, tmp_path: Path) -> None:
    task = job("")._replace(command=["missing.py"])
    events = run(actor, task)
    assert b"no such script: 'missing.py'" in data_of(events, ray_task.ERR)
    assert data_of(events, ray_task.CODE) == b"2"


def test_no_process_can_be_started(actor: TaskActor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(ray_task, "supervise", fail)
    events = run(actor, job("pass"))
    assert data_of(events, ray_task.REPORT).startswith(b"203\nResourceError: not all tasks")
    assert data_of(events, ray_task.CODE) == b"203"


def test_variables_of_a_task() -> None:
    launcher = {
        "HOSTOPT_NONFINITE": "skip",
        "TF_LOG": "launcher",
        "PATH": "launcher",
        "OF_LAUNCHER": "x",
        "RAY_ADDRESS": "launcher",
    }
    node = {"HOSTOPT_NONFINITE": "warn", "PATH": "node", "OMP_NUM_THREADS": "4", "RAY_JOB_ID": "1"}
    task = job("pass", TF_CONFIG="{}")._replace(inherited=launcher, threads=3)
    result = environment_of(task, node, {progress.VARIABLE: "/node/progress"})
    assert result["HOSTOPT_NONFINITE"] == "skip"
    assert (result["PATH"], result["OF_LAUNCHER"]) == ("node", "x")
    assert "RAY_ADDRESS" not in result and result["RAY_JOB_ID"] == "1"
    assert result["TF_CONFIG"] == "{}"
    assert result[progress.VARIABLE] == "/node/progress"
    assert (result["TF_NUM_INTRAOP_THREADS"], result["OMP_NUM_THREADS"]) == ("3", "4")
    assert ("TF_USE_LEGACY_KERAS" in result) == has_keras_3()


# --- events ---------------------------------------------------------------------------------


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
