"""Every way in which a process of `hostopt run` can end: who else ends, and with which code.

The table in docs/reliability.md, cell by cell. The ranks are a real ring, without TensorFlow.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from launcher import NOTE, ROOT, Launcher, is_gone, lines_of, python, until

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("signals_not_ignored"),
]

# Reduces until the chief finds the order "end"; an evaluator waits until the ranks have ended.
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
    while not ring.all_reduce(numpy.array([float((orders / "end").exists())]))[0]:
        note(task)
        obey()
        time.sleep(0.01)
    ring.close()
    print("done")
""")
TASKS = ("chief:0", "worker:0", "evaluator:0")


class Run:
    """Two ranks and an evaluator that have begun, and all processes of theirs."""

    def __init__(self, launcher: Launcher, *arguments: str, **settings: Any) -> None:
        times: dict[str, Any] = {"grace_s": 0.3, "kill_s": 0.3, "preemption_s": 1.0, **settings}
        command = ("-np", "2", "--evaluators", "1", *arguments, "--", *python(RING))
        self.orders = launcher.notes.with_name("orders")
        self.orders.mkdir()
        self.process = launcher.run(*command, **times, ORDERS=str(self.orders))
        self.ranks = {task: launcher.pids(task, 1)[0] for task in TASKS}
        self.supervisors = {task: psutil.Process(pid).ppid() for task, pid in self.ranks.items()}
        self.family = [self.process.pid, *self.supervisors.values(), *self.ranks.values()]

    def order(self, task: str, what: str) -> None:
        """Have a task run a line of Python."""
        draft = self.orders / f"{task}.draft"
        draft.write_text(what)
        draft.rename(self.orders / task)

    def end(self) -> None:
        """Have the ranks end in good order."""
        (self.orders / "end").touch()

    def result(self) -> tuple[int, str, str]:
        """Wait for the launcher: its exit code and what it has printed; nobody must be left."""
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
        ("os.kill(os.getpid(), signal.SIGSTOP)", 201, "{task} did not end when others did"),
        ("sys.exit(0)", 200, "{task} ended with exit code 0 before the others had done"),
        ("os._exit(0)", 200, "{task} ended with exit code 0 before the others had done"),
        ("sys.exit(1)", 1, "{task}: exit code 1"),
        ("raise ZeroDivisionError", 1, "{task}: exit code 1"),
        ("sys.exit(195)", 195, "{task}: exit code 195"),
        ("time.sleep(600)", 201, "{task} did not end when others did"),
    ],
)
def test_a_rank(run: Run, task: str, order: str, code: int, cause: str) -> None:
    run.order(task, order)
    found, _, err = run.result()
    assert found == code, err
    assert f"root cause: {cause.format(task=task)}" in err


def test_a_rank_that_has_failed_and_is_slow_to_end(launcher: Launcher) -> None:
    """The launcher loses its patience with it, but knows that it would fail again."""
    run = Run(launcher, "--max-restarts", "5")
    run.order(
        "worker:0", "import atexit; atexit.register(time.sleep, 600); raise ZeroDivisionError"
    )
    found, _, err = run.result()
    assert found == 1, err
    assert "root cause: worker:0: exit code 1; another attempt would not change that" in err


@pytest.mark.parametrize("how", ["sys.exit(0)", "os._exit(0)"])
def test_all_ranks_with_0(run: Run, how: str) -> None:
    """The evaluator is told, though nobody has trained to the end."""
    for task in ("chief:0", "worker:0"):  # both in the same step
        run.order(task, f"ring.barrier(); {how}")
    found, out, err = run.result()
    assert found == 0, err
    assert lines_of(out, "evaluator:0") == ["evaluated"]


def test_a_rank_with_0_is_started_again(launcher: Launcher) -> None:
    run = Run(launcher, "--max-restarts", "1")
    order = run.orders / "worker:0"
    run.order("worker:0", f"os.unlink({str(order)!r}); os._exit(0)")
    launcher.pids("chief:0", 2)
    run.end()
    found, _, err = run.result()
    assert found == 0, err


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
def test_an_evaluator(run: Run, order: str, code: int) -> None:
    """The ranks go on to their end; then its code is that of the run."""
    run.order("evaluator:0", order)
    until(lambda: is_gone(run.ranks["evaluator:0"]), "end of the evaluator")
    run.end()
    found, out, err = run.result()
    assert found == code, err
    assert lines_of(out, "chief:0") == lines_of(out, "worker:0") == ["done"]


def test_an_evaluator_that_is_stopped(run: Run) -> None:
    """The ranks go on to their end; the launcher waits for it until somebody loses patience."""
    os.kill(run.ranks["evaluator:0"], signal.SIGSTOP)
    run.end()
    until(lambda: is_gone(run.ranks["chief:0"]), "end of the training")
    run.process.send_signal(signal.SIGTERM)
    found, out, err = run.result()
    assert found == 143, err
    assert lines_of(out, "chief:0") == lines_of(out, "worker:0") == ["done"]


# --- a supervisor -----------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("task", ["chief:0", "worker:0"])
def test_a_supervisor_of_a_rank(run: Run, task: str, signum: signal.Signals) -> None:
    os.kill(run.supervisors[task], signum)
    found, _, err = run.result()
    assert found == 128 + signum, err
    assert f"root cause: {task}: exit code {128 + signum} ({signum.name})" in err


@pytest.mark.parametrize("task", ["worker:0", "evaluator:0"])
def test_a_supervisor_that_is_stopped_delays_the_end(run: Run, task: str) -> None:
    os.kill(run.supervisors[task], signal.SIGSTOP)
    run.end()
    until(lambda: is_gone(run.ranks["chief:0"]), "end of the training")
    os.kill(run.supervisors[task], signal.SIGCONT)
    found, _, err = run.result()
    assert found == 0, err


def test_a_supervisor_that_is_stopped_does_not_save_its_rank(run: Run) -> None:
    os.kill(run.supervisors["worker:0"], signal.SIGSTOP)
    run.process.send_signal(signal.SIGTERM)  # which it does not deliver, nor SIGKILL
    found, _, err = run.result()
    assert found == 143, err


def test_a_killed_supervisor_of_an_evaluator(run: Run) -> None:
    os.kill(run.supervisors["evaluator:0"], signal.SIGKILL)
    until(lambda: is_gone(run.ranks["evaluator:0"]), "end of the evaluator")
    run.end()
    found, out, err = run.result()
    assert found == 137, err
    assert lines_of(out, "chief:0") == ["done"]


# --- the launcher -----------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_launcher_is_signalled(run: Run, signum: signal.Signals) -> None:
    run.process.send_signal(signum)
    found, _, err = run.result()
    assert found == 128 + signum, err


def test_the_launcher_is_killed(run: Run) -> None:
    run.process.kill()
    assert run.result()[0] == -signal.SIGKILL


@pytest.mark.parametrize("through", ["python", "bash"])
def test_the_launcher_and_all_supervisors_are_killed(launcher: Launcher, through: str) -> None:
    """Also when the command is a shell with a rank and another process."""
    script = launcher.notes.parent / f"{launcher.notes.name}.py"
    script.write_text(NOTE + "note('ready'); time.sleep(600)")
    line = f"{sys.executable} {script}"
    command = line.split() if through == "python" else ["bash", "-c", f"{line} & {line}; true"]
    process = launcher.run("-np", "2", "--", *command)
    ranks = launcher.pids("ready", 2 if through == "python" else 4)
    family = psutil.Process(process.pid).children(recursive=True)
    supervisors = [child for child in family if "_supervisor.py" in " ".join(child.cmdline())]
    assert len(supervisors) == 2
    process.send_signal(signal.SIGSTOP)  # it must not see to anything
    for supervisor in supervisors:
        supervisor.kill()
    until(lambda: all(map(is_gone, ranks)), "end of the ranks")
    until(lambda: all(is_gone(member.pid) for member in family), "end of all descendants")
    process.kill()
    process.communicate()


def test_the_launcher_is_stopped_and_goes_on(run: Run) -> None:
    run.process.send_signal(signal.SIGSTOP)
    run.end()
    until(lambda: is_gone(run.ranks["chief:0"]), "end of the training")
    run.process.send_signal(signal.SIGCONT)
    found, _, err = run.result()
    assert found == 0, err


# --- whoever starts the launcher ----------------------------------------------------------------


@pytest.fixture
def started_by() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`hostopt run`, started by a program that has run a line of Python before it."""
    started = []

    def start(before: str, *arguments: str) -> subprocess.Popen[str]:
        code = f"""
            import os, signal, sys
            {before}
            os.execv(sys.executable, [sys.executable, "-m", "hostopt.cli", "run", *sys.argv[1:]])
        """
        process = subprocess.Popen(
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
    """As some service managers do: the kernel would keep no exit codes for the launcher."""
    child = f"open({str(tmp_path / 'lives')!r}, 'a').write('x'); raise SystemExit({code})"
    before = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    process = started_by(before, "-np", "1", "--max-restarts", "1", "--", *python(child))
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert (tmp_path / "lives").read_text() == "x" * attempts


def test_a_parent_that_blocks_signals(started_by: Any, tmp_path: Path) -> None:
    before = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD])"
    child = f"import time; open({str(tmp_path / 'ready')!r}, 'w'); time.sleep(600)"
    process = started_by(before, "-np", "1", "--", *python(child))
    until((tmp_path / "ready").exists, "start of the rank")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 143, err


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_standard_descriptors(
    started_by: Any, tmp_path: Path, closed: tuple[int, ...]
) -> None:
    """What is printed must not get into a socket or a pipe that has got the number."""
    child = "import sys; print('x' * 9); print('y' * 9, file=sys.stderr); sys.exit(7)"
    before = "; ".join(f"os.close({fd})" for fd in closed)
    process = started_by(before, "-np", "2", "--", *python(child))
    out, err = process.communicate(timeout=30)
    assert process.returncode == 7, err
    assert ("[chief:0] xxxxxxxxx" in out) == (1 not in closed)
    assert ("[chief:0] yyyyyyyyy" in err) == (2 not in closed)
    assert "SIG" not in err


def test_closed_descriptors_of_a_rank_by_hand(tmp_path: Path) -> None:
    """What is printed must not get into a file of the program that has got the number."""
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
    assert subprocess.run(command, env=environment, timeout=50, check=False).returncode == 0
    assert (tmp_path / "results").read_text() == "a result"


def test_output_that_is_never_read(launcher: Launcher) -> None:
    """Ranks go on, and the code is right; what is too much is dropped, as is said later."""
    line = 1 << 20
    code = NOTE + f"for _ in range(40): print('x' * {line - 1})\nnote('done'); sys.exit(7)"
    process = launcher.run("-np", "2", "--", *python(code), patience_s=0.1)
    launcher.pids("done", 2)  # though neither standard output nor standard error is read
    out, err = process.communicate(timeout=30)
    assert process.returncode == 7, err
    dropped = sum(map(int, re.findall(r"hostopt: (\d+) lines dropped", out)))
    whole = len(lines_of(out, "chief:0")) + len(lines_of(out, "worker:0"))
    assert 15 <= whole < 80
    assert whole + dropped == 80


def test_output_of_which_nobody_reads_the_errors(launcher: Launcher) -> None:
    """The launcher's own lines do not stop it either."""
    code = NOTE + "print('x' * (1 << 23), file=sys.stderr); sys.exit(200)"
    command = ("-np", "1", "--max-restarts", "5", "--", *python(code))
    process = launcher.run(*command, patience_s=0.1)
    assert process.wait(40) == 200


def test_output_that_is_read_slowly_is_whole(launcher: Launcher) -> None:
    """More of it than may wait in the launcher, each line slower than patience; all is read."""
    code = NOTE + f"for _ in range(3): print('x' * {(8 << 20) - 1})\nnote('done')"
    process = launcher.run("-np", "1", "--", *python(code), patience_s=0.1)
    assert process.stdout is not None
    chunks = []
    while chunk := os.read(process.stdout.fileno(), 1 << 16):  # a little at a time
        chunks.append(chunk)
    assert process.wait(40) == 0
    assert b"".join(chunks).count(b"\n") == 24
    assert b"dropped" not in b"".join(chunks)
