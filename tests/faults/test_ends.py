"""All ways in which a process of `hostopt run` can end, and the exits that follow.

These tests cover the table in docs/reliability.md cell by cell. The ranks are a real ring without
TensorFlow.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import ROOT, Process, deadline_s, is_gone, python, until
from launcher import NOTE, Launcher, lines_of

pytestmark = pytest.mark.usefixtures("forwarded_signals_not_ignored")

# Ranks reduce until a rank finds the file "end"; an evaluator waits until the ranks have ended. A
# task executes the file of its name. Ranks execute the file "all" in the same step.
RING = NOTE + textwrap.dedent("""
    import json, numpy
    orders = pathlib.Path(os.environ["ORDERS"])
    task = "{type}:{index}".format(**json.loads(os.environ["TF_CONFIG"])["task"])
    def obey():
        order = orders / task
        if order.exists():
            exec(order.read_text())
    if task == "evaluator:0":
        note(task)
        while not os.path.exists(os.environ["HOSTOPT_RING_ENDED"]):
            obey()
            time.sleep(0.01)
        print("evaluated")
        sys.exit()
    import hostopt
    ring = hostopt.connect(options=hostopt.Options(collective_timeout_s=2.0))
    while True:
        flags = [float((orders / name).exists()) for name in ("end", "all")]
        must_end, is_order_of_all = ring.all_reduce(numpy.array(flags))
        if must_end:
            break
        if is_order_of_all:
            exec((orders / "all").read_text())
        note(task)
        obey()
        time.sleep(0.01)
    ring.close()
    print("done")
""")
TASKS = ("chief:0", "worker:0", "evaluator:0")


class Run:
    """A run of two ranks and an evaluator that have started, with all their processes."""

    def __init__(self, launcher: Launcher, *arguments: str, **settings: Any) -> None:
        short_s = deadline_s(0.3)  # a rank takes longer to exit on a busy machine
        times = {"grace_s": short_s, "kill_s": short_s, "preemption_s": 1.0, **settings}
        command = ("-np", "2", "--evaluators", "1", *arguments, "--", *python(RING))
        self.orders = launcher.notes.with_name("orders")
        self.orders.mkdir()
        self.process = launcher.run(*command, **times, ORDERS=str(self.orders))
        self.ranks = {task: launcher.pids(task, 1)[0] for task in TASKS}
        self.supervisors = {task: psutil.Process(pid).ppid() for task, pid in self.ranks.items()}
        self.family = [self.process.pid, *self.supervisors.values(), *self.ranks.values()]

    def order(self, task: str, code: str) -> None:
        """Makes a task run a line of Python; "all" stands for both ranks, in the same step."""
        draft = self.orders / f"{task}.draft"
        draft.write_text(code)
        draft.rename(self.orders / task)

    def end(self) -> None:
        """Makes the ranks succeed."""
        (self.orders / "end").touch()

    def result(self) -> tuple[int, str, str]:
        """Waits for all processes to end; returns the launcher's exit code and output."""
        out, err = self.process.communicate(timeout=40)
        until(lambda: all(map(is_gone, self.family)), "end of all processes")
        return self.process.returncode, out, err


@pytest.fixture
def run(launcher: Launcher) -> Run:
    return Run(launcher)


# --- a rank -----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["chief:0", "worker:0"])
@pytest.mark.parametrize(
    ("order", "code", "cause"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "{task}: exit code 137 (SIGKILL)"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "{task}: exit code 143 (SIGTERM)"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", 201, "{task} did not exit in time"),
        ("sys.exit(0)", 200, "{task} exited with code 0 before the other tasks"),
        ("os._exit(0)", 200, "{task} exited with code 0 before the other tasks"),
        ("sys.exit(1)", 1, "{task}: exit code 1"),
        ("raise ZeroDivisionError", 1, "{task}: exit code 1"),
        ("sys.exit(195)", 195, "{task}: exit code 195"),
        ("time.sleep(600)", 201, "{task} did not exit in time"),
    ],
)
def test_a_rank_ends(run: Run, task: str, order: str, code: int, cause: str) -> None:
    run.order(task, order)
    exit_code, _, err = run.result()
    assert exit_code == code, err
    assert f"root cause: {cause.format(task=task)}" in err


def test_a_failed_rank_that_is_slow_to_exit(launcher: Launcher) -> None:
    """The launcher kills the rank, but treats the error that the rank reported as final."""
    run = Run(launcher, "--max-restarts", "5")
    run.order(
        "worker:0", "import atexit; atexit.register(time.sleep, 600); raise ZeroDivisionError"
    )
    code, _, err = run.result()
    assert code == 1, err
    assert "root cause: worker:0: exit code 1; a restart would fail the same way" in err


@pytest.mark.parametrize("how", ["sys.exit(0)", "os._exit(0)"])
def test_all_ranks_exit_early_with_0(run: Run, how: str) -> None:
    """The evaluator learns that the ranks have ended, although none has finished training."""
    run.order("all", f"ring.barrier(); {how}")
    code, out, err = run.result()
    assert code == 0, err
    assert lines_of(out, "evaluator:0") == ["evaluated"]


def test_a_rank_that_exits_early_with_0_is_restarted(launcher: Launcher) -> None:
    run = Run(launcher, "--max-restarts", "1")
    order = run.orders / "worker:0"
    run.order("worker:0", f"os.unlink({str(order)!r}); os._exit(0)")
    launcher.pids("chief:0", 2)
    run.end()
    code, _, err = run.result()
    assert code == 0, err


# --- an evaluator -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("sys.exit(0)", 0),
        ("sys.exit(1)", 1),
        ("sys.exit(195)", 195),
    ],
)
def test_an_evaluator_ends(run: Run, order: str, code: int) -> None:
    """The ranks train to the end; the run has the exit code of the evaluator."""
    run.order("evaluator:0", order)
    until(lambda: is_gone(run.ranks["evaluator:0"]), "end of the evaluator")
    run.end()
    exit_code, out, err = run.result()
    assert exit_code == code, err
    assert lines_of(out, "chief:0") == lines_of(out, "worker:0") == ["done"]


def test_a_stopped_evaluator(run: Run) -> None:
    """The ranks train to the end; the launcher waits for the evaluator until a signal comes."""
    os.kill(run.ranks["evaluator:0"], signal.SIGSTOP)
    run.end()
    until(lambda: is_gone(run.ranks["chief:0"]), "end of the training")
    run.process.send_signal(signal.SIGTERM)
    code, out, err = run.result()
    assert code == 143, err
    assert lines_of(out, "chief:0") == lines_of(out, "worker:0") == ["done"]


# --- a supervisor -----------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("task", ["chief:0", "worker:0"])
def test_the_supervisor_of_a_rank_ends(run: Run, task: str, signum: signal.Signals) -> None:
    os.kill(run.supervisors[task], signum)
    exit_code, _, err = run.result()
    assert exit_code == 128 + signum, err
    assert f"root cause: {task}: exit code {128 + signum} ({signum.name})" in err


@pytest.mark.parametrize("task", ["worker:0", "evaluator:0"])
def test_a_stopped_supervisor_delays_the_end(run: Run, task: str) -> None:
    os.kill(run.supervisors[task], signal.SIGSTOP)
    run.end()
    until(lambda: is_gone(run.ranks["chief:0"]), "end of the training")
    os.kill(run.supervisors[task], signal.SIGCONT)
    code, _, err = run.result()
    assert code == 0, err


def test_a_rank_is_killed_although_its_supervisor_is_stopped(run: Run) -> None:
    os.kill(run.supervisors["worker:0"], signal.SIGSTOP)
    run.process.send_signal(signal.SIGTERM)  # the supervisor delivers neither this nor SIGKILL
    code, _, err = run.result()
    assert code == 143, err


def test_the_supervisor_of_an_evaluator_is_killed(run: Run) -> None:
    os.kill(run.supervisors["evaluator:0"], signal.SIGKILL)
    until(lambda: is_gone(run.ranks["evaluator:0"]), "end of the evaluator")
    run.end()
    code, out, err = run.result()
    assert code == 137, err
    assert lines_of(out, "chief:0") == ["done"]


# --- the launcher -----------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_launcher_is_signalled(run: Run, signum: signal.Signals) -> None:
    run.process.send_signal(signum)
    code, _, err = run.result()
    assert code == 128 + signum, err


def test_the_launcher_is_killed(run: Run) -> None:
    run.process.kill()
    assert run.result()[0] == -signal.SIGKILL


@pytest.mark.parametrize("through", ["python", "bash"])
def test_the_launcher_and_all_supervisors_are_killed(launcher: Launcher, through: str) -> None:
    """The command is a rank, or a shell with a rank and another process."""
    script = launcher.notes.parent / f"{launcher.notes.name}.py"
    script.write_text(NOTE + "note('ready'); time.sleep(600)")
    line = f"{sys.executable} {script}"
    command = line.split() if through == "python" else ["bash", "-c", f"{line} & {line}; true"]
    process = launcher.run("-np", "2", "--", *command)
    ranks = launcher.pids("ready", 2 if through == "python" else 4)
    family = psutil.Process(process.pid).children(recursive=True)
    supervisors = [child for child in family if "_supervisor.py" in " ".join(child.cmdline())]
    assert len(supervisors) == 2
    process.send_signal(signal.SIGSTOP)  # so that it does not act
    for supervisor in supervisors:
        supervisor.kill()
    until(lambda: all(map(is_gone, ranks)), "end of the ranks")
    until(lambda: all(is_gone(member.pid) for member in family), "end of all descendants")
    process.kill()
    process.communicate()


def test_the_launcher_is_stopped_and_continued(run: Run) -> None:
    run.process.send_signal(signal.SIGSTOP)
    run.end()
    until(lambda: is_gone(run.ranks["chief:0"]), "end of the training")
    run.process.send_signal(signal.SIGCONT)
    code, _, err = run.result()
    assert code == 0, err


# --- the parent of the launcher --------------------------------------------------------------


@pytest.fixture
def started_by() -> Iterator[Callable[..., Process]]:
    """Starts `hostopt run` from a process that has executed a line of Python first."""
    started = []

    def start(before: str, *arguments: str) -> Process:
        code = f"""
            import os, signal, sys
            {before}
            os.execv(sys.executable, [sys.executable, "-m", "hostopt", "run", *sys.argv[1:]])
        """
        process = Process(
            [*python(code), *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("code", "attempts"), [(0, 1), (7, 1), (200, 2)])
def test_a_parent_that_ignores_sigchld(
    started_by: Any, tmp_path: Path, code: int, attempts: int
) -> None:
    """Some service managers do. The kernel would keep no exit codes for the launcher."""
    child = f"open({str(tmp_path / 'attempts')!r}, 'a').write('x'); raise SystemExit({code})"
    before = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    process = started_by(before, "-np", "1", "--max-restarts", "1", "--", *python(child))
    process.ended_with(code)
    assert (tmp_path / "attempts").read_text() == "x" * attempts


def test_a_parent_that_blocks_signals(started_by: Any, tmp_path: Path) -> None:
    before = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD])"
    child = f"import time; open({str(tmp_path / 'ready')!r}, 'w'); time.sleep(600)"
    process = started_by(before, "-np", "1", "--", *python(child))
    until((tmp_path / "ready").exists, "start of the rank")
    process.send_signal(signal.SIGTERM)
    process.ended_with(143)


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_standard_descriptors(
    started_by: Any, tmp_path: Path, closed: tuple[int, ...]
) -> None:
    """Printed text must not go into a socket or pipe that has the number of the descriptor."""
    child = "import sys; print('x' * 9); print('y' * 9, file=sys.stderr); sys.exit(7)"
    before = "; ".join(f"os.close({fd})" for fd in closed)
    process = started_by(before, "-np", "2", "--", *python(child))
    out, err = process.ended_with(7)
    assert ("[chief:0] xxxxxxxxx" in out) == (1 not in closed)
    assert ("[chief:0] yyyyyyyyy" in err) == (2 not in closed)
    assert "SIG" not in err


def test_closed_descriptors_of_a_rank_by_hand(tmp_path: Path) -> None:
    """Printed text must not go into a file that has the number of the descriptor."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
            import sys, hostopt
            file = open({str(tmp_path / "results")!r}, "w")
            assert file.fileno() == 2
            hostopt.connect()
            print("a warning", file=sys.stderr, flush=True)
            file.write("a result")
        """)
    )
    command = ["bash", "-c", f"exec {sys.executable} {program} 2>&-"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, timeout=deadline_s(50), check=False)
    assert done.returncode == 0
    assert (tmp_path / "results").read_text() == "a result"
