"""Tasks on a node as the launcher sees them, with a node that is this process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_ray import FakeHandle, FakeRay, FakeRayError
from harness import deadline_s, python, until

from hostopt.launch import ray_task
from hostopt.launch.ray_task import Job, RelayedSupervisor, TaskActor, describe
from hostopt.options import RING_ENDED
from hostopt.process import error_report
from hostopt.telemetry import progress

LIMIT_S = 60.0
READY = "import os, signal, sys, time; print('ready', flush=True);"


class Relayed:
    """A task on a node.

    Args:
      directory: directory of the launcher's files.
      code: code of the task.
    """

    def __init__(self, directory: Path, code: str) -> None:
        self.progress, self.report = directory / "progress", directory / "report"
        self.ring_ended = directory / "ended"
        settings = {
            progress.VARIABLE: str(self.progress),
            error_report.VARIABLE: str(self.report),
            RING_ENDED: str(self.ring_ended),
        }
        job = Job(1, python(code), ("worker", 0), settings, os.environ, os.getcwd(), 1)
        self.handle = FakeHandle(TaskActor("127.0.0.1"))
        self.lost = threading.Event()
        self.supervisor = RelayedSupervisor(FakeRay(), self.handle, "node", job, self.lost.set)
        self.lifeline = self.supervisor.lifeline
        self.lifeline.settimeout(deadline_s(LIMIT_S))

    def wait(self) -> bytes:
        """Waits for the end of the task, and returns the last message of the lifeline."""
        messages = list(iter(lambda: self.lifeline.recv(64), b""))
        self.lifeline.close()
        self.supervisor.join(deadline_s(LIMIT_S))
        return messages[-1]

    def end(self) -> None:
        """Kills a task that the test has left."""
        self.handle.error = None
        self.handle.signal.remote(1, [signal.SIGKILL]).result()
        self.lifeline.close()
        self.supervisor.join(deadline_s(LIMIT_S))


Start = Callable[[str], Relayed]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(code)` starts a task, which ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(code: str) -> Relayed:
            task = Relayed(tmp_path, code)
            stack.callback(task.end)
            return task

        yield start


def test_output_files_and_exit_code(start: Start) -> None:
    code = """
        import sys
        from hostopt import errors
        from hostopt.process import error_report
        from hostopt.telemetry.progress import write_progress
        write_progress("training", {"step": 3})
        error_report.write_report(errors.ConfigError("unusable. Correct it"), 78, None)
        print("out" * 100_000)
        print("err", file=sys.stderr)
        sys.exit(78)
    """
    task = start(code)
    assert task.supervisor.stdout.read() == b"out" * 100_000 + b"\n"
    assert task.supervisor.stderr.read() == b"err\n"
    assert task.wait() == b"code 78"
    assert task.supervisor.wait(0) == 78
    assert progress.read_progress(str(task.progress)) == {"training": {"step": 3}}
    report = error_report.read_report(str(task.report))
    assert report == (78, "ConfigError: unusable. Correct it")
    assert not task.lost.is_set()


def test_signals_reach_the_task(start: Start) -> None:
    code = (
        f"{READY} signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print(); time.sleep(99)"
    )
    task = start(code)
    assert task.supervisor.stdout.readline() + task.supervisor.stdout.readline() == b"ready\n\n"
    with pytest.raises(subprocess.TimeoutExpired):
        task.supervisor.wait(0.01)
    task.lifeline.send(bytes([signal.SIGTERM]))
    assert task.wait() == b"code 7"


def test_the_end_of_the_lifeline_kills_the_task(start: Start) -> None:
    task = start(f"{READY} time.sleep(99)")
    assert task.supervisor.stdout.readline() == b"ready\n"
    task.lifeline.close()
    assert task.supervisor.wait(deadline_s(LIMIT_S)) == 128 + signal.SIGKILL


def test_the_end_of_the_ring_reaches_an_evaluator(start: Start) -> None:
    code = f"{READY} path = os.environ['HOSTOPT_RING_ENDED']\nwhile not os.path.exists(path): pass"
    task = start(code)
    assert task.supervisor.stdout.readline() == b"ready\n"
    task.ring_ended.touch()
    assert task.wait() == b"code 0"


def test_answers_that_are_lost_come_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_task, "_POLL_S", 0.01)
    task = start("for i in range(1000): print(i, flush=True)")
    task.handle.lost_answers = 3
    assert task.supervisor.stdout.read().split() == [b"%d" % i for i in range(1000)]
    assert task.wait() == b"code 0"
    assert task.handle.lost_answers == 0


def test_a_lost_node_is_named(start: Start) -> None:
    task = start(f"{READY} time.sleep(99)")
    assert task.supervisor.stdout.readline() == b"ready\n"
    task.handle.error = FakeRayError("The actor died.\n\tclass_name: A\n\tip: 1\nIts node died.")
    task.lifeline.send(bytes([signal.SIGHUP]))  # its call fails, too
    assert task.wait() == b"code 137"
    assert task.lost.is_set()
    cause = "node node lost this task: The actor died. Its node died."
    assert error_report.read_report(str(task.report)) == (137, cause)


def test_an_actor_that_does_not_kill_its_task_is_killed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_task, "_KILL_S", 0.01)
    task = start(f"{READY} time.sleep(99)")
    assert task.supervisor.stdout.readline() == b"ready\n"
    task.supervisor.kill()
    until(lambda: task.handle.is_killed, "kill of the actor")
    assert task.supervisor.wait(deadline_s(LIMIT_S)) == 128 + signal.SIGKILL
    assert error_report.read_report(str(task.report)) == (None, "")


def test_long_messages_of_ray_are_cut() -> None:
    assert describe(FakeRayError("x" * 1000)) == "x" * 400 + "..."
