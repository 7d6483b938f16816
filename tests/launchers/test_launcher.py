"""The launcher with real processes and signals. Tasks are a few lines of Python."""

from __future__ import annotations

import ast
import errno
import logging
import signal
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from fake_launcher import FakeTask, World
from harness import ROOT, is_gone, python, until
from launcher import NOTE, Launcher, launched, lines_of

from hostopt.errors import ResourceError
from hostopt.launch import task_group

pytestmark = pytest.mark.usefixtures("forwarded_signals_not_ignored")


# --- exit codes -------------------------------------------------------------------------------


FAIL_IF = """
import json, os, signal, sys, time
task = "{type}:{index}".format(**json.loads(os.environ["TF_CONFIG"])["task"])
"""


def test_the_first_failure_gives_the_exit_code(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    code = FAIL_IF + "sys.exit(7) if task == 'worker:1' else time.sleep(600)"
    with caplog.at_level(logging.INFO):
        assert launched(python(code), size=3, evaluators=1, grace_s=0.2) == 7
    (line,) = [text for text in caplog.messages if "failed first" in text]
    assert line.startswith("worker:1 failed first: exit code 7;")


def test_other_tasks_have_time_to_report_and_exit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = FAIL_IF + textwrap.dedent(f"""
        flag = {str(tmp_path / "flag")!r}
        if task == "worker:0":
            while not os.path.exists(flag): time.sleep(0.01)
            sys.exit(65)
        open(flag, "w").close()
        time.sleep(0.5)
        print("reported")
        sys.exit(200)
    """)
    assert launched(python(code), size=2) == 65
    assert lines_of(capfd.readouterr().out, "chief:0") == ["reported"]


def test_exit_code_of_a_signal_is_128_plus_its_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    code = FAIL_IF + "os.kill(os.getpid(), 9) if task == 'chief:0' else time.sleep(600)"
    assert launched(python(code), size=2, grace_s=0.1) == 128 + 9
    assert "chief:0 failed first: exit code 137 (SIGKILL)" in caplog.text


def test_a_task_that_ignores_sigterm_is_killed(launcher: Launcher) -> None:
    code = NOTE + textwrap.dedent("""
        signal.signal(signal.SIGTERM, lambda *_: note("terminated"))
        if "chief" in os.environ["TF_CONFIG"].partition('"task"')[2]:
            while not list(pathlib.Path(os.environ["NOTES"]).glob("ready.*")): time.sleep(0.01)
            sys.exit(3)
        note("ready")
        while True: time.sleep(1)
    """)
    _, err = launcher.ended("-np", "2", *python(code), grace_s=0.1, kill_s=0.5, code=3, limit_s=15)
    assert launcher.pids("terminated", 1) == launcher.pids("ready", 1)
    assert "sending SIGKILL to worker:0" in err


def test_the_launcher_waits_for_evaluators(capfd: pytest.CaptureFixture[str]) -> None:
    code = FAIL_IF + "\nif task == 'evaluator:0': time.sleep(0.5); print('evaluated')"
    assert launched(python(code), size=2, evaluators=1, grace_s=0.0) == 0
    assert lines_of(capfd.readouterr().out, "evaluator:0") == ["evaluated"]


def test_a_failed_evaluator_does_not_stop_the_ring(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = FAIL_IF + "\nif task == 'evaluator:0': sys.exit(9)\ntime.sleep(0.5); print('trained')"
    assert launched(python(code), size=1, evaluators=1, grace_s=0.0) == 9
    assert lines_of(capfd.readouterr().out, "chief:0") == ["trained"]


def test_background_processes_of_a_command_are_killed(launcher: Launcher) -> None:
    background = NOTE + "note('left'); time.sleep(600)"
    code = NOTE + textwrap.dedent(f"""
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", {background!r}])
        while not list(pathlib.Path(os.environ["NOTES"]).glob("left.*")): time.sleep(0.01)
    """)
    process = launcher.run("-np", "1", *python(code))
    assert process.wait(15) == 0
    (left,) = launcher.pids("left", 1)
    assert is_gone(left)


# --- signals ----------------------------------------------------------------------------------


WAIT = NOTE + "note('ready'); time.sleep(600)"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_every_process_of_every_task(
    launcher: Launcher, signum: signal.Signals
) -> None:
    code = NOTE + textwrap.dedent(f"""
        def stop(*_):  # bash dies of SIGTERM and SIGHUP long before this returns
            time.sleep(0.3)
            note("stopped")
            sys.exit(0)
        signal.signal({int(signum)}, stop)
        note("ready")
        while True: time.sleep(1)
    """)
    script = launcher.notes.parent / f"{launcher.notes.name}.py"
    script.write_text(code)
    # The trailing command keeps bash between the supervisor and Python.
    process = launcher.run(
        "-np", "2", "--evaluators", "1", "--", "bash", "-c", f"{sys.executable} {script}; true"
    )
    ready = launcher.pids("ready", 3)
    process.send_signal(signum)
    process.ended_with(128 + signum, limit_s=15)
    assert sorted(launcher.pids("stopped", 3)) == sorted(ready)


def test_a_second_ctrl_c_kills_at_once(launcher: Launcher) -> None:
    code = NOTE + textwrap.dedent("""
        signal.signal(signal.SIGINT, lambda *_: note("first"))
        note("ready")
        while True: time.sleep(1)
    """)
    process = launcher.run("-np", "2", *python(code))
    launcher.pids("ready", 2)
    process.send_signal(signal.SIGINT)
    ready = launcher.pids("first", 2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert all(map(is_gone, ready))


def test_repeated_sigterm_does_not_kill_tasks(launcher: Launcher) -> None:
    """A first Ctrl-C after SIGTERM does not kill them either."""
    code = NOTE + textwrap.dedent("""
        signal.signal(signal.SIGTERM, lambda *_: note("terminated"))
        signal.signal(signal.SIGINT, lambda *_: (note("saved"), sys.exit(130)))
        note("ready")
        while True: time.sleep(1)
    """)
    process = launcher.run("-np", "2", *python(code))
    launcher.pids("ready", 2)
    process.send_signal(signal.SIGTERM)
    launcher.pids("terminated", 2)  # of two pending signals, the lower number is delivered first
    for signum in (signal.SIGTERM, signal.SIGINT):
        process.send_signal(signum)
    assert process.wait(10) == 143
    assert len(launcher.pids("saved", 2)) == 2


@pytest.mark.parametrize("through_bash", [False, True])
def test_no_orphan_when_the_launcher_is_killed(launcher: Launcher, through_bash: bool) -> None:
    script = launcher.notes.parent / f"{launcher.notes.name}.py"
    script.write_text(WAIT)
    bash = ["bash", "-c", f"{sys.executable} {script} & {sys.executable} {script}; true"]
    command = bash if through_bash else [str(script)]
    process = launcher.run("-np", "2", "--", *command)
    launcher.pids("ready", 4 if through_bash else 2)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == (8 if through_bash else 4)
    process.kill()
    until(lambda: all(is_gone(member.pid) for member in family), "end of all descendants")


def test_a_signal_to_a_supervisor_reaches_its_command(launcher: Launcher) -> None:
    code = NOTE + textwrap.dedent("""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        note("ready")
        while True: time.sleep(1)
    """)
    process = launcher.run("-np", "1", *python(code))
    launcher.pids("ready", 1)
    (supervisor,) = psutil.Process(process.pid).children()
    supervisor.terminate()
    assert process.wait(10) == 5


def test_a_killed_supervisor_kills_its_command(launcher: Launcher) -> None:
    process = launcher.run("-np", "1", *python(WAIT))
    (ready,) = launcher.pids("ready", 1)
    (supervisor,) = psutil.Process(process.pid).children()
    supervisor.kill()
    assert process.wait(10) == 137
    until(lambda: is_gone(ready), "end of the command")


def test_an_ignored_signal_stays_ignored(launcher: Launcher) -> None:
    """As under nohup."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code = NOTE + "print(signal.getsignal(signal.SIGHUP).name); note('ready'); time.sleep(600)"
        process = launcher.run("-np", "1", *python(code))
    finally:
        signal.signal(signal.SIGHUP, previous)
    launcher.pids("ready", 1)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    out, err = process.ended_with(143, limit_s=10)
    assert lines_of(out, "chief:0") == ["SIG_IGN"]
    assert "SIGHUP" not in err


def test_signal_handlers_are_restored() -> None:
    before = [signal.getsignal(signum) for signum in task_group.FORWARDED]
    assert launched(["true"], size=1) == 0
    assert [signal.getsignal(signum) for signum in task_group.FORWARDED] == before


# --- the supervisor ---------------------------------------------------------------------------


def test_the_supervisor_imports_only_the_standard_library() -> None:
    tree = ast.parse((ROOT / "hostopt" / "launch" / "_supervisor.py").read_text())
    imported = {
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= {
        "__future__", "contextlib", "fcntl", "os", "select", "signal", "subprocess", "sys"
    }  # fmt: skip


# --- tasks that cannot be started -------------------------------------------------------------


def test_evaluators_end_if_the_ring_cannot_be_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher must not wait for an evaluator that waits for ranks."""
    chiefs: list[FakeTask] = []

    def on_start(task: FakeTask) -> None:
        if task.name == "chief:0":
            chiefs.append(task)
            if len(chiefs) == 2:
                raise OSError(errno.EMFILE, "Too many open files")

    world = World(
        on_start,
        on_end=lambda task: None,
        on_signal=lambda signum: None,
        on_wait=lambda: None,
        size=1,
        evaluators=1,
        max_restarts=1,
    )
    world.begin(monkeypatch)
    try:
        world.resume()  # both tasks report their process groups
        chiefs[0].end(200)
        world.resume()
        assert world.wait_until_s is not None  # for the restart
        world.now_s = world.wait_until_s
        world.resume()
        assert world.wait_until_s == world.now_s + task_group.GRACE_S
        (evaluator,) = (task for task in world.tasks if task.name == "evaluator:0")
        evaluator.end(0)
        world.resume()
        assert world.code == ResourceError.exit_code
    finally:
        world.close()
