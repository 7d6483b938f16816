"""Real processes and real signals; the children are a few lines of Python, without TensorFlow."""

from __future__ import annotations

import ast
import fcntl
import json
import logging
import os
import signal
import sys
import textwrap
from collections import Counter
from pathlib import Path

import psutil
import pytest
from launcher import NOTE, Launcher, is_gone, lines_of, python, until

from hostopt import cli, launch, task_group
from hostopt.cluster import Cluster

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("signals_not_ignored")]

ROOT = Path(__file__).resolve().parents[1]
F_SETPIPE_SZ = 1031  # in the module fcntl from Python 3.10 on
CORES = len(os.sched_getaffinity(0))


# --- what a task is given ---------------------------------------------------------------------


def test_each_task_reads_its_place_from_tf_config(capfd: pytest.CaptureFixture[str]) -> None:
    command = python("import os; print(os.environ['TF_CONFIG'])")
    assert launch.launch(command, size=3, evaluators=2) == 0
    out = capfd.readouterr().out
    found = {}
    for task in ("chief:0", "worker:0", "worker:1", "evaluator:0", "evaluator:1"):
        (config,) = lines_of(out, task)
        cluster = Cluster.from_tf_config({"TF_CONFIG": config})
        assert cluster.task is not None
        found[cluster.task.name] = (cluster.role, cluster.rank, cluster.size)
        addresses = [member.address for member in cluster.ring + cluster.evaluators]
        assert len(set(addresses)) == 5
        assert {address.rpartition(":")[0] for address in addresses} == {"127.0.0.1"}
    assert found == {
        "chief:0": ("chief", 0, 3),
        "worker:0": ("worker", 1, 3),
        "worker:1": ("worker", 2, 3),
        "evaluator:0": ("evaluator", None, 3),
        "evaluator:1": ("evaluator", None, 3),
    }


def test_one_rank_is_a_chief_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.launch(python("import os; print(os.environ['TF_CONFIG'])"), size=1) == 0
    (config,) = map(json.loads, lines_of(capfd.readouterr().out, "chief:0"))
    assert list(config["cluster"]) == ["chief"]
    assert config["task"] == {"type": "chief", "index": 0}


LISTEN = """
import errno, json, os, socket
config = json.loads(os.environ["TF_CONFIG"])
ports = [int(a.rpartition(":")[2]) for job in config["cluster"].values() for a in job]
task = config["task"]
port = int(config["cluster"][task["type"]][task["index"]].rpartition(":")[2])
"""


def test_a_task_can_listen_on_its_port_and_others_avoid_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = LISTEN + textwrap.dedent("""
        for taken in ports:
            with socket.socket() as other:  # as one that does not know of the cluster
                try:
                    other.bind(("127.0.0.1", taken))
                except OSError as error:
                    assert error.errno == errno.EADDRINUSE
                else:
                    raise SystemExit(f"{taken} is not reserved")
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        client = socket.create_connection(("127.0.0.1", port))
        server.accept()[0].sendall(b"hello")
        print(client.recv(5).decode())
    """)
    assert launch.launch(python(code), size=3, evaluators=1) == 0
    said = capfd.readouterr().out.splitlines()
    assert sorted(said) == sorted(
        f"[{task}] hello" for task in ("chief:0", "worker:0", "worker:1", "evaluator:0")
    )


def test_a_grpc_server_can_take_the_port(capfd: pytest.CaptureFixture[str]) -> None:
    code = LISTEN + textwrap.dedent("""
        from concurrent import futures
        import grpc
        server = grpc.server(futures.ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
        assert server.add_insecure_port(f"127.0.0.1:{port}") == port
        server.start()
        channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        grpc.channel_ready_future(channel).result(timeout=10)
        print("ready")
        server.stop(None).wait()
    """)
    assert launch.launch(python(code), size=2) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[chief:0] ready", "[worker:0] ready"]


THREADS = """
import os
names = "TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES"
names += ("TF_USE_LEGACY_KERAS",)
print(*(os.environ.get(name, "-") for name in names), sep=",")
"""


@pytest.mark.parametrize("size", [1, 2, CORES + 1])
def test_ranks_divide_the_cores(
    size: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert launch.launch(python(THREADS), size=size, evaluators=1) == 0
    out = capfd.readouterr().out
    share = max(1, CORES // size)
    assert lines_of(out, "chief:0") == [f"{share},{share},1,0,1"]
    assert lines_of(out, "evaluator:0") == ["1,1,1,,1"]


def test_cores_are_divided_by_the_ranks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
    threads = [
        task_group._environment({}, {}, (job, 0), size)["OMP_NUM_THREADS"]
        for size, job in [
            (1, "chief"),
            (2, "chief"),
            (3, "worker"),
            (8, "worker"),
            (2, "evaluator"),
        ]
    ]
    assert threads == ["7", "3", "2", "1", "1"]


def test_the_users_own_settings_win(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "5")
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "0")
    assert launch.launch(python(THREADS), size=2, evaluators=1) == 0
    out = capfd.readouterr().out
    for task in ("worker:0", "evaluator:0"):
        (line,) = lines_of(out, task)
        assert line.startswith("5,6,") and line.endswith(",0")


# --- what it prints ---------------------------------------------------------------------------


def test_every_line_carries_its_task(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('a\\n\\nb'); print('e', file=sys.stderr); print('part', end='')"
    assert launch.launch(python(code), size=2) == 0
    out, err = capfd.readouterr()
    for task in ("chief:0", "worker:0"):
        assert lines_of(out, task) == ["a", "", "b", "part"]
        assert lines_of(err, task) == ["e"]
    assert len(out.splitlines()) == 8
    assert out.endswith("\n")
    assert len(err.splitlines()) == 2


def test_lines_of_many_tasks_stay_whole(launcher: Launcher) -> None:
    code = """
        import json, os, sys
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        for _ in range(200):  # each line in pieces, and more of them than a pipe holds
            for _ in range(5):
                sys.stdout.write((task["type"][0] + str(task["index"])) * 1000)
                sys.stdout.flush()
            sys.stdout.write("\\n")
    """
    process = launcher.run("-np", "3", *python(code))
    assert process.stdout is not None
    fcntl.fcntl(process.stdout, F_SETPIPE_SZ, 4096)  # so that no line fits in one write
    out, err = process.communicate(timeout=20)
    assert Counter(out.splitlines()) == {
        f"[chief:0] {'c0' * 5000}": 200,
        f"[worker:0] {'w0' * 5000}": 200,
        f"[worker:1] {'w1' * 5000}": 200,
    }, err


def test_output_that_nobody_reads_stops_no_task(launcher: Launcher) -> None:
    code = NOTE + "print('x'); note('ready'); sys.stdin.read()\nfor _ in range(9999): print('x')"
    process = launcher.run("-np", "2", *python(code + "\nnote('done')"))
    assert process.stdout is not None
    process.stdout.close()
    launcher.pids("done", 2)
    assert process.wait(10) == 0


# --- how it ends ------------------------------------------------------------------------------

FAIL_IF = """
import json, os, signal, sys, time
task = "{type}:{index}".format(**json.loads(os.environ["TF_CONFIG"])["task"])
"""


def test_the_first_failure_gives_the_exit_code(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    code = FAIL_IF + "sys.exit(7) if task == 'worker:1' else time.sleep(600)"
    with caplog.at_level(logging.INFO):
        assert launch.launch(python(code), size=3, evaluators=1, grace_s=0.2) == 7
    (line,) = [text for text in caplog.messages if "failed first" in text]
    assert line.startswith("worker:1 failed first: exit code 7;")


def test_the_others_may_report_and_end_by_themselves(
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
    assert launch.launch(python(code), size=2) == 65
    assert lines_of(capfd.readouterr().out, "chief:0") == ["reported"]


def test_a_signal_counts_as_128_plus_its_number(caplog: pytest.LogCaptureFixture) -> None:
    code = FAIL_IF + "os.kill(os.getpid(), 9) if task == 'chief:0' else time.sleep(600)"
    assert launch.launch(python(code), size=2, grace_s=0.1) == 128 + 9
    assert "chief:0 failed first: exit code 137 (SIGKILL)" in caplog.text


def test_who_ignores_sigterm_is_killed(launcher: Launcher) -> None:
    code = NOTE + textwrap.dedent("""
        signal.signal(signal.SIGTERM, lambda *_: note("terminated"))
        if "chief" in os.environ["TF_CONFIG"].partition('"task"')[2]:
            while not list(pathlib.Path(os.environ["NOTES"]).glob("ready.*")): time.sleep(0.01)
            sys.exit(3)
        note("ready")
        while True: time.sleep(1)
    """)
    process = launcher.run("-np", "2", *python(code), grace_s=0.1, kill_s=0.5)
    _, err = process.communicate(timeout=15)
    assert process.returncode == 3, err
    assert launcher.pids("terminated", 1) == launcher.pids("ready", 1)
    assert "sending SIGKILL to worker:0" in err


def test_evaluators_are_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    code = FAIL_IF + "\nif task == 'evaluator:0': time.sleep(0.5); print('evaluated')"
    assert launch.launch(python(code), size=2, evaluators=1, grace_s=0.0) == 0
    assert lines_of(capfd.readouterr().out, "evaluator:0") == ["evaluated"]


def test_a_failed_evaluator_does_not_stop_the_ring(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = FAIL_IF + "\nif task == 'evaluator:0': sys.exit(9)\ntime.sleep(0.5); print('trained')"
    assert launch.launch(python(code), size=1, evaluators=1, grace_s=0.0) == 9
    assert lines_of(capfd.readouterr().out, "chief:0") == ["trained"]


def test_what_a_command_leaves_behind_is_killed(launcher: Launcher) -> None:
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
        def stop(*_):  # bash dies of SIGTERM and SIGHUP long before this ends
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
    _, err = process.communicate(timeout=15)
    assert process.returncode == 128 + signum, err
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


def test_a_sigterm_that_comes_several_times_kills_nobody(launcher: Launcher) -> None:
    """Nor does a first Ctrl-C after it."""
    code = NOTE + textwrap.dedent("""
        signal.signal(signal.SIGTERM, lambda *_: note("told"))
        signal.signal(signal.SIGINT, lambda *_: (note("saved"), sys.exit(130)))
        note("ready")
        while True: time.sleep(1)
    """)
    process = launcher.run("-np", "2", *python(code))
    launcher.pids("ready", 2)
    process.send_signal(signal.SIGTERM)
    launcher.pids("told", 2)  # of two signals that wait, the one with the lower number comes first
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


def test_a_killed_supervisor_takes_its_command_along(launcher: Launcher) -> None:
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
    out, err = process.communicate(timeout=10)
    assert process.returncode == 143, err
    assert lines_of(out, "chief:0") == ["SIG_IGN"]
    assert "SIGHUP" not in err


def test_the_callers_signal_handlers_come_back() -> None:
    before = [signal.getsignal(signum) for signum in task_group.FORWARDED]
    assert launch.launch(["true"], size=1) == 0
    assert [signal.getsignal(signum) for signum in task_group.FORWARDED] == before


# --- command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [["no-such-command"], ["no_such_script.py"], ["/etc/passwd"], ["--", "nothing"]]
)
def test_a_missing_command_is_named(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "-np", "2", *command]) == 2
    assert command[-1] in capfd.readouterr().err
    assert not psutil.Process().children()


def test_a_command_that_cannot_be_executed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    assert cli.main(["run", "-np", "2", str(broken)]) == 2
    assert f"[chief:0] hostopt: cannot start {str(broken)!r}" in capfd.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run"],
        ["run", "-np", "2"],
        ["run", "-np", "2", "--"],
        ["run", "-np", "0", "true"],
        ["run", "-np", "two", "true"],
        ["run", "-np", "1", "--evaluators", "-1", "true"],
        ["run", "true", "-np", "1"],
        ["run", "-np", "2", "--max-restarts", "-1", "true"],
        ["run", "-np", "2", "--max-restarts", "1", "--min-np", "3", "true"],
        ["run", "-np", "2", "--max-restarts", "1", "--min-np", "0", "true"],
        ["run", "-np", "2", "--min-np", "1", "true"],
        ["walk"],
    ],
)
def test_usage_errors_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage: hostopt" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.startswith("hostopt ")


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_options_after_the_command_are_its_own(
    dashes: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "main.py"
    script.write_text("import sys; print(sys.executable, *sys.argv[1:])")
    own = ["-np", "7", "--version", "-h", "--", "--evaluators", "2"]
    assert cli.main(["run", "-np", "1", *dashes, str(script), *own]) == 0
    (line,) = lines_of(capfd.readouterr().out, "chief:0")
    assert line == " ".join([sys.executable, *own])


def test_the_supervisor_imports_the_standard_library_alone() -> None:
    tree = ast.parse((ROOT / "hostopt" / "_supervisor.py").read_text())
    imported = {
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= {
        "__future__", "contextlib", "fcntl", "os", "select", "signal", "subprocess", "sys"
    }  # fmt: skip
