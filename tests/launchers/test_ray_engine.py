"""`hostopt run --on ray` on a cluster of Ray, whose nodes are processes of this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from harness import PROGRAMS, QUIET, is_gone, python, until
from launcher import NOTE, Launcher, lines_of
from ranks import Ranks

if TYPE_CHECKING:
    from ray_nodes import Nodes

pytestmark = pytest.mark.usefixtures("forwarded_signals_not_ignored")

LIMIT_S = 60.0
NO_WAIT = ("--places-timeout-s", "1")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    from ray_nodes import Nodes

    nodes = Nodes()
    yield nodes
    nodes.close()


# Exits as the dictionary `code` says for slot and attempt; `then` runs otherwise.
def by_plan(then: str) -> list[str]:
    """Returns the command of a program with the variables `slot`, `size` and `attempt`."""
    return python(
        NOTE
        + textwrap.dedent("""
            import json
            from hostopt.process import error_report
            config = json.loads(os.environ["TF_CONFIG"])
            slot, size = int(os.environ.get("HOSTOPT_SLOT", -1)), 0
            size = len(config["cluster"]["chief"] + config["cluster"].get("worker", []))
            note(f"slot{slot}")
            attempt = len(list(pathlib.Path(os.environ["NOTES"]).glob(f"slot{slot}.*")))
            def kill_node():
                os.kill(int(os.environ["RAY_RAYLET_PID"]), signal.SIGKILL)
                time.sleep(600)
            def wait_for(name, count=1):
                while len(list(pathlib.Path(os.environ["NOTES"]).glob(f"{name}.*"))) < count:
                    time.sleep(0.05)
        """)
        + textwrap.dedent(then)
    )


# --- tasks ------------------------------------------------------------------------------------


def test_tasks_run_on_three_nodes_with_an_evaluator(launcher: Launcher, nodes: Nodes) -> None:
    nodes.have(4)
    command = by_plan("""
        import hashlib, hostopt, numpy
        print("raylet", os.environ["RAY_RAYLET_PID"])
        print("secret", hashlib.sha256(os.environ["HOSTOPT_TOKEN"].encode()).hexdigest())
        print(os.environ["ONLY_THE_LAUNCHER"], os.getcwd(), file=sys.stderr)
        if slot >= 0:
            with hostopt.connect() as ring:
                print("sum", ring.all_reduce(numpy.array([slot + 1.0]))[0])
        else:
            while not os.path.exists(os.environ["HOSTOPT_RING_ENDED"]): time.sleep(0.01)
            print("evaluated")
    """)
    options = (*nodes.options, "-np", "3", "--evaluators", "1", "--verbose")
    out, err = launcher.ended(*options, *command, ONLY_THE_LAUNCHER="x", limit_s=LIMIT_S)
    tasks = ("chief:0", "worker:0", "worker:1", "evaluator:0")
    lines = {task: lines_of(out, task) for task in tasks}
    assert len({lines[task][0] for task in tasks}) == 4  # nodes
    assert len({lines[task][1] for task in tasks}) == 1  # tokens
    assert [lines[task][2] for task in tasks] == [*["sum 6.0"] * 3, "evaluated"]
    for task in tasks:
        assert lines_of(err, task) == [f"x {os.getcwd()}"]


@pytest.mark.parametrize(
    ("action", "code", "cause"),
    [
        ("raise ZeroDivisionError('by the user')", 1, "ZeroDivisionError: by the user"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "worker:0: exit code 137 (SIGKILL)"),
        (
            "error = hostopt.NonFiniteGradientError('NaN in the gradient. Lower the rate')\n"
            "    error_report.write_report(error, 79, None); sys.exit(79)",
            79,
            "NonFiniteGradientError: NaN in the gradient. Lower the rate",
        ),
        ("os.execv('/no-such-program', ['x'])", 1, "FileNotFoundError"),
    ],
)
def test_exit_codes_and_causes(
    launcher: Launcher, nodes: Nodes, action: str, code: int, cause: str
) -> None:
    nodes.have(2)
    then = f"import hostopt\nif slot == 1:\n    {action}\nwait_for('never')"
    _, err = launcher.ended(
        *nodes.options,
        "-np",
        "2",
        *by_plan(then),
        grace_s=0.1,
        kill_s=0.5,
        code=code,
        limit_s=LIMIT_S,
    )
    assert cause in err
    assert f"worker:0: exit code {code}" in err


def test_a_script_that_the_nodes_lack(launcher: Launcher, nodes: Nodes, tmp_path: Path) -> None:
    nodes.have(1)
    _, err = launcher.ended(
        *nodes.options, "-np", "1", "no-such-program.py", code=2, limit_s=LIMIT_S
    )
    assert "no such script: 'no-such-program.py'" in err


def test_logs_are_files_of_the_launcher(launcher: Launcher, nodes: Nodes, tmp_path: Path) -> None:
    nodes.have(1)
    command = python("print('to the log'); import sys; print('too', file=sys.stderr)")
    logs = ("--log-dir", str(tmp_path / "logs"))
    launcher.ended(*nodes.options, "-np", "1", *logs, *command, limit_s=LIMIT_S)
    log = (tmp_path / "logs" / "chief-0.attempt-1.log").read_text()
    assert sorted(log.splitlines()) == ["to the log", "too"]


# --- signals ----------------------------------------------------------------------------------

FOREVER = """
    def handle(signum, frame):
        print("got", signum)
        sys.exit(128 + signum)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, handle)
    import subprocess
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path(os.environ["NOTES"], f"child.{child.pid}").touch()
    note("ready")
    time.sleep(600)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_tasks(launcher: Launcher, nodes: Nodes, signum: int) -> None:
    nodes.have(2)
    process = launcher.run(*nodes.options, "-np", "2", *by_plan(FOREVER))
    pids = launcher.pids("ready", 2)
    process.send_signal(signum)
    out, _ = process.ended_with(128 + signum, limit_s=LIMIT_S)
    assert lines_of(out, "chief:0") == lines_of(out, "worker:0") == [f"got {signum}"]
    assert all(map(is_gone, (*pids, *launcher.pids("child", 2))))


def test_no_process_is_left_if_the_launcher_is_killed(launcher: Launcher, nodes: Nodes) -> None:
    nodes.have(2)
    process = launcher.run(*nodes.options, "-np", "2", *by_plan(FOREVER))
    pids = [*launcher.pids("ready", 2), *launcher.pids("child", 2)]
    process.kill()
    process.communicate(timeout=LIMIT_S)
    until(lambda: all(map(is_gone, pids)), "end of all tasks", LIMIT_S)


@pytest.mark.parametrize("stopped", ["os.getpid()", "os.getppid()"])
def test_a_stopped_task_is_killed(launcher: Launcher, nodes: Nodes, stopped: str) -> None:
    """The second one is the supervisor, which cannot kill its command then."""
    nodes.have(2)
    command = by_plan(f"""
        if slot == 1: os.kill({stopped}, signal.SIGSTOP)
        note("ready")
        if slot == 0: wait_for("ready", 2 if {stopped} == os.getppid() else 1)
        sys.exit(200) if slot == 0 else time.sleep(600)
    """)
    _, err = launcher.ended(
        *nodes.options, "-np", "2", *command, grace_s=0.1, kill_s=0.2, code=200, limit_s=LIMIT_S
    )
    assert "root cause: worker:0 did not exit in time" in err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, -15), (signal.SIGINT, 130)])
def test_a_signal_ends_a_run_that_waits_for_nodes(
    launcher: Launcher, nodes: Nodes, signum: int, code: int
) -> None:
    nodes.have(1)
    process = launcher.run(*nodes.options, "-np", "2", *python("pass"))
    until(lambda: "waiting for room for 2 x CPU=1" in _read_line(process.stderr), "wait", LIMIT_S)
    process.send_signal(signum)
    _, err = process.ended_with(code, limit_s=LIMIT_S)
    assert "Traceback" not in err


def _read_line(stream: Any) -> str:
    return str(stream.readline())


# --- nodes that come and go -------------------------------------------------------------------


def test_too_few_nodes(launcher: Launcher, nodes: Nodes) -> None:
    nodes.have(1)
    _, err = launcher.ended(
        *nodes.options, "-np", "2", *NO_WAIT, *python("pass"), code=203, limit_s=LIMIT_S
    )
    assert "no room for 2 x CPU=1 (2 nodes, with CPU=1 free in total) within 1 s" in err


def test_a_slot_moves_to_a_spare_node(launcher: Launcher, nodes: Nodes) -> None:
    nodes.have(3)
    command = by_plan("""
        if slot == 1: note(f"raylet {os.environ['RAY_RAYLET_PID']} size {size}")
        if slot == 1 and attempt == 1: kill_node()
        if attempt == 1: wait_for("never")
        print("size", size)
    """)
    options = ("-np", "2", "--max-restarts", "1")
    out, err = launcher.ended(*nodes.options, *options, *command, grace_s=0.1, limit_s=LIMIT_S)
    assert re.search(r"worker:0: node [\d.]+ \(\w{8}\) lost this task: .*node", err), err
    # in files, as the last line of a task may be lost with its node
    first, second = (note.stem for note in launcher.notes.glob("raylet *"))
    assert first != second
    assert first.endswith("size 2") and second.endswith("size 2")
    assert lines_of(out, "worker:0") == ["size 2"]


def test_an_evaluator_moves_to_a_spare_node(launcher: Launcher, nodes: Nodes) -> None:
    nodes.have(3)
    command = by_plan("""
        if slot < 0 and attempt == 1: kill_node()
        print("raylet", os.environ["RAY_RAYLET_PID"])
        if slot < 0: note("again")
        wait_for("again")
    """)
    options = ("-np", "1", "--evaluators", "1", "--max-restarts", "1")
    out, err = launcher.ended(*nodes.options, *options, *command, limit_s=LIMIT_S)
    assert re.search(r"evaluator:0: node [\d.]+ \(\w{8}\) lost this task", err), err
    assert lines_of(out, "evaluator:0") != lines_of(out, "chief:0")


def test_a_ring_goes_on_without_a_node_and_takes_one_that_joins(
    launcher: Launcher, nodes: Nodes
) -> None:
    nodes.have(2)
    command = by_plan("""
        print("attempt", attempt, "of", slot, "size", size)
        if slot == 1 and attempt == 1: kill_node()
        if attempt == 1: wait_for("never")
        if size == 1:
            note("alone")
            wait_for("joined")
            sys.exit(200)
    """)
    options = ("-np", "2", "--min-np", "1", "--max-restarts", "3", *NO_WAIT)
    process = launcher.run(*nodes.options, *options, *command, grace_s=0.1)
    launcher.pids("alone", 1)
    nodes.have(2)
    (launcher.notes / "joined.0").touch()
    out, err = process.ended_with(limit_s=LIMIT_S)
    assert "going on with 1 of 2 places: there is no room for slot 1" in err
    assert "attempt 2 of 0 size 1" in lines_of(out, "chief:0")
    assert "attempt 3 of 0 size 2" in lines_of(out, "chief:0")


# --- trainings --------------------------------------------------------------------------------

STEPS = 9


def arguments(directory: Path, **chosen: Any) -> str:
    settings = {
        "optimizers": ["adam"],
        "steps": STEPS,
        "checkpoint_steps": 1,
        "bucket_mb": 2**-12,
        "collective_timeout_s": 30.0,
        "model_dir": str(directory),
    }
    return json.dumps({**settings, **chosen})


def final(directory: Path) -> dict[str, np.ndarray]:
    """Returns all variables after the last step."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(directory / "adam" / f"model.ckpt-{STEPS}"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def test_training_goes_on_without_a_dead_node(
    launcher: Launcher, nodes: Nodes, ranks: Ranks, tmp_path: Path
) -> None:
    nodes.have(3)
    fault = {"point": "between-updates", "step": 5, "action": "kill-node", "slot": 2}
    _, err = launcher.ended(
        *(*nodes.options, "-np", "3", "--min-np", "2", "--max-restarts", "2", *NO_WAIT, "--"),
        *(sys.executable, str(PROGRAMS / "train_with_fault.py")),
        arguments(tmp_path / "elastic", fault=fault),
        limit_s=200,
        **QUIET,
    )
    saved = re.search(r"model.ckpt-(\d+) was saved by 3 ranks, and now there are 2", err)
    assert saved, err
    assert re.search(r"hostopt: steps: +0 to 9", err)  # the summary
    again = tmp_path / "again" / "adam"
    again.mkdir(parents=True)
    for file in (tmp_path / "elastic" / "adam").glob(f"model.ckpt-{saved[1]}.*"):
        shutil.copy(file, again)
    (again / "checkpoint").write_text(f'model_checkpoint_path: "model.ckpt-{saved[1]}"\n')
    ranks.run("train_with_fault.py", 2, arguments=[arguments(tmp_path / "again")])
    result, expected = final(tmp_path / "elastic"), final(tmp_path / "again")
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(result[name], value, err_msg=name)


def test_a_signal_to_the_launcher_saves_a_checkpoint(
    launcher: Launcher, nodes: Nodes, tmp_path: Path
) -> None:
    nodes.have(2)
    process = launcher.run(
        *(*nodes.options, "-np", "2", "--"),
        *(sys.executable, str(PROGRAMS / "train_with_fault.py")),
        arguments(tmp_path, steps=1_000_000, checkpoint_steps=5),
        **QUIET,
    )
    checkpoints = (tmp_path / "adam").glob
    until(lambda: any(checkpoints("model.ckpt-[1-9]*.index")), "checkpoint of a step", 120.0)
    process.terminate()
    _, err = process.ended_with(143, limit_s=LIMIT_S)
    saved = re.search(r"hostopt: model_dir: .*, saved at (\d+)", err)
    assert saved, err
    assert (tmp_path / "adam" / f"model.ckpt-{saved[1]}.index").exists()
