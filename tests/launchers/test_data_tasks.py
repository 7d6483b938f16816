"""Data workers as tasks of `hostopt run`: how they start, restart and end. Without TensorFlow."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Process, python
from launcher import NOTE, Launcher, lines_of

pytestmark = pytest.mark.usefixtures("forwarded_signals_not_ignored")

# Each task executes the code of its job, a data worker by default until the ranks have ended.
TASK = NOTE + textwrap.dedent("""
    import json
    config = json.loads(os.environ["TF_CONFIG"])
    job, index = config["task"]["type"], config["task"]["index"]
    def wait_for(path):
        while not os.path.exists(path):
            time.sleep(0.01)
    codes = json.loads(sys.argv[1])
    note(f"started-{job}-{index}")
    exec(codes.get(job, "wait_for(os.environ['HOSTOPT_RING_ENDED'])"))
""")
SERVED_ONCE = "wait_for(os.path.join(os.environ['NOTES'], 'end'))"


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    for process in launcher.started:
        process.kill()
        process.communicate()


def start(launcher: Launcher, *arguments: str, grace_s: float = 30.0, **codes: str) -> Process:
    codes = {"chief": SERVED_ONCE, "worker": SERVED_ONCE, **codes}
    command = [*python(TASK), json.dumps(codes)]
    return launcher.run(
        "-np", "2", "--data-workers", "2", *arguments, "--", *command, grace_s=grace_s
    )


def end(launcher: Launcher) -> None:
    (launcher.notes / "end").touch()


def result(process: Process, code: int) -> tuple[str, list[str]]:
    """Returns standard output, and the lines of standard error."""
    out, err = process.ended_with(code)
    return out, err.splitlines()


def test_all_tasks_know_the_addresses_of_the_data_workers(launcher: Launcher) -> None:
    shown = "print(json.dumps(config['cluster']['data']), os.environ.get('CUDA_VISIBLE_DEVICES'))"
    process = start(
        launcher, chief=shown, worker=shown, data=f"{shown}; wait_for('{launcher.notes}/end')"
    )
    launcher.pids("started-data-0", 1)
    launcher.pids("started-data-1", 1)
    end(launcher)
    out, _ = result(process, 0)
    (addresses,) = {line.rpartition(" ")[0] for task in TASKS for line in lines_of(out, task)}
    assert len(set(json.loads(addresses))) == 2
    for task in TASKS:
        (line,) = lines_of(out, task)
        assert (line.rpartition(" ")[2] == "") == task.startswith("data")


TASKS = ("chief:0", "worker:0", "data:0", "data:1")


def test_a_restarted_data_worker_has_the_same_address_and_directory(launcher: Launcher) -> None:
    code = """
print(config["cluster"]["data"], os.environ["HOSTOPT_DATA_DIR"])
note(f"shown-{index}")
wait_for(os.environ["HOSTOPT_RING_ENDED"])
"""
    process = start(launcher, "--max-restarts", "1", data=code)
    (pid,) = launcher.pids("shown-1", 1)
    os.kill(pid, signal.SIGKILL)
    launcher.pids("shown-1", 2)
    end(launcher)
    out, err = result(process, 0)
    assert len(lines_of(out, "data:1")) == 2
    assert len(set(lines_of(out, "data:1"))) == 1
    (line,) = [line for line in err if "data:1: exit code 137 (SIGKILL); restarting it" in line]
    assert "elements that it had taken, and those in its shuffle buffers, are lost" in line


def test_ranks_that_fail_end_the_data_workers_at_once(launcher: Launcher) -> None:
    process = start(launcher, chief="note('chief'); sys.exit(3)", worker="")
    _, err = result(process, 3)
    assert not [line for line in err if "data:" in line]


def test_ranks_that_lose_their_data_end_with_its_exit_code(launcher: Launcher) -> None:
    process = start(launcher, data="if index: os.kill(os.getpid(), 9)\n")
    _, err = result(process, 128 + signal.SIGKILL)
    assert err[-1] == "hostopt: data:1: exit code 137 (SIGKILL); the ranks need its data"


def test_a_data_worker_that_does_not_serve_is_named(launcher: Launcher) -> None:
    process = start(launcher, data="pass")
    launcher.pids("started-data-0", 1)
    launcher.pids("started-data-1", 1)
    for line in iter(process.stderr.readline, ""):
        if "data:1 exited with code 0 before the ranks" in line:
            break
    end(launcher)
    result(process, 0)


def test_a_data_worker_that_does_not_end_is_killed(launcher: Launcher) -> None:
    process = start(launcher, data="time.sleep(100)", grace_s=0.1)
    launcher.pids("started-data-0", 1)
    launcher.pids("started-data-1", 1)
    end(launcher)
    result(process, 0)


def test_data_workers_get_no_signal_before_the_ranks_have_ended(launcher: Launcher) -> None:
    rank = """
signal.signal(signal.SIGTERM, lambda *_: note(f"signalled-{job}"))
note("ready")
wait_for(os.path.join(os.environ["NOTES"], "end"))
sys.exit(143)
"""
    data = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(note('data'))); note('ready'); "
    process = start(launcher, chief=rank, worker=rank, data=data + "signal.pause()")
    launcher.pids("ready", 4)
    process.send_signal(signal.SIGTERM)
    launcher.pids("signalled-chief", 1)
    launcher.pids("signalled-worker", 1)
    assert not list(launcher.notes.glob("data.*"))
    end(launcher)
    result(process, 143)  # they are killed then
    assert not list(launcher.notes.glob("data.*"))


def test_data_workers_on_other_machines_are_refused(launcher: Launcher) -> None:
    arguments = ("-np", "2", "--data-workers", "1", "--on", "ray", "--", "python")
    _, err = result(launcher.run(*arguments), 2)
    assert "--data-workers contradicts --on ray" in err[-1]
