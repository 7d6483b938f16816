"""The line of a run while it trains, its summary, and which lines of tasks are shown."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, Process, python
from launcher import Launcher, lines_of

from hostopt.launch import monitor
from hostopt.launch.line_filter import LineFilter
from hostopt.launch.monitor import Monitor, describe, summarize
from hostopt.telemetry.progress import VARIABLE, main_metric, read_progress, write_progress

TRAINING: dict[str, Any] = {
    "first_step": 0,
    "resumed_step": 0,
    "step": 500,
    "last_step": 2000,
    "loss": 0.25,
    "steps_per_s": 100.0,
    "examples_per_s": 6400.0,
    "mean_steps_per_s": 90.0,
    "mean_examples_per_s": 5760.0,
    "communication_ms": 2.0,
    "hidden_percent": 75.0,
    "slowest_rank": 1,
    "checkpoint_step": 450,
    "model_dir": "/models/digits",
    "times_ms": {"input": 1.0, "forward_and_backward": 8.0, "update": 1.0},
}
EVALUATION = {"step": 450, "metric": "accuracy", "value": 0.9, "best": 0.95, "best_step": 300}


# What tasks print on standard error, each line with True if it is shown.
LINES = [
    ("INFO:tensorflow:Using config: {'_session_config': device_count {", False),
    ('  key: "CPU"', False),
    ("}", False),
    (", '_keep_checkpoint_max': 5}", False),
    ("a line of the program", True),
    ("  indented", True),
    ("INFO:tensorflow:loss = 0.1, step = 100", False),
    ("  indented", False),
    ("I0000 00:00:1795524666.227085    6803 port.cc:153] oneDNN custom operations", False),
    ("2026-01-01 00:00:00.123456: I tensorflow/core/util/port.cc:153] oneDNN", False),
    ("2026-01-01 00:00:00.123456: W tensorflow/core/data.cc:1] no memory", True),
    ("WARNING: All log messages before absl::InitializeLog() is called are written", False),
    ("E0000 00:00:1.2 721 cuda_platform.cc:52] failed call to cuInit", False),
    ("E0000 00:00:1.2 721 rpc.cc:52] a connection is lost", True),
    ("E0000 00:00:1.2 721 cuda_driver.cc:1] CUDA_ERROR_OUT_OF_MEMORY", True),
    ("WARNING:tensorflow:my metric is deprecated", True),
    ("WARNING:tensorflow:From a.py:1: f (from b) is deprecated and will be removed", False),
    ("Instructions for updating:", False),
    ("Use something else.", False),
    ("WARNING:tensorflow:the ranks differ", True),
    ("WARNING:tensorflow:the ranks differ", False),
    ("ERROR:tensorflow:the disk is full", True),
    ("INFO:tensorflow:an open brace: {", False),
    ("a line of the program", True),
    ("INFO:tensorflow:Using config: {'_master': '{'", False),
    ("of the configuration", False),
    ("Fatal Python error: Segmentation fault", True),
    ("I1124 00:00:00.1 1 estimator.py:1] Using config: {'_master': '{'", False),
    ("of the configuration", False),
    ("ERROR:tensorflow:the disk is full", True),
    ("a line of the program", True),
    ("WARNING:tensorflow:From a.py:1: g (from b) is deprecated and will be removed", False),
    ("Instructions for updating:", False),
    ("Traceback (most recent call last):", True),
    ('  File "main.py", line 1, in <module>', True),
    ("INFO:tensorflow:of another thread", False),
    ('  File "other.py", line 2, in f', True),
    ("ValueError: {'a': 1", True),
    ("after an open brace", True),
    ("To enable the following instructions: AVX2 FMA, in other operations, rebuild", False),
    (
        "W0000 00:00:1.2 7 local_rendezvous.cc:412] Local rendezvous is aborting with status: "
        "OUT_OF_RANGE: End of sequence",
        False,
    ),
    ("\t [[{{node IteratorGetNext}}]]", False),
    (
        "W0000 00:00:1.2 7 local_rendezvous.cc:412] Local rendezvous is aborting with status: "
        "INVALID_ARGUMENT: Incompatible shapes",
        True,
    ),
    ("I0000 00:00:12.3 7 worker_impl.cc:190] Worker registered. Worker config: goo.gle", False),
    ("port: 39689", False),
    ('protocol: "grpc"', False),
    ("", False),
    ("loss: 0.1", True),
    ("2026-01-01 00:00:00.1: I tensorflow/core/data/service/a.cc:1] with config: port: 1", False),
    ('protocol: "grpc"', False),
    ("a line of the program", True),
    ("loss: 0.1", True),
]


def test_lines_that_only_inform_are_hidden() -> None:
    shown = LineFilter()
    assert [(line, shown.shows(f"{line}\n".encode())) for line, _ in LINES] == LINES


def test_what_is_hidden_is_in_the_log(launcher: Launcher, tmp_path: Path) -> None:
    code = """
        import logging, sys
        logging.basicConfig(level=logging.INFO, format="%(levelname)s:%(message)s")
        logging.info("starts"); logging.warning("careful"); print("INFO: printed")
    """
    logs = tmp_path / "logs"
    quiet = launcher.run("-np", "2", "--log-dir", str(logs), *python(code))
    out, err = quiet.communicate(timeout=20)
    assert lines_of(out, "chief:0") == ["INFO: printed"]
    assert lines_of(err, "worker:0") == ["WARNING:careful"]
    for task in ("chief-0", "worker-0"):
        lines = (logs / f"{task}.attempt-1.log").read_text().splitlines()
        assert sorted(lines) == ["INFO: printed", "INFO:starts", "WARNING:careful"]
    verbose = launcher.run("-np", "2", "--verbose", *python(code))
    _, err = verbose.communicate(timeout=20)
    assert lines_of(err, "worker:0") == ["INFO:starts", "WARNING:careful"]


def test_each_attempt_has_a_log(launcher: Launcher, tmp_path: Path) -> None:
    code = "import os; print('slot', os.environ['HOSTOPT_SLOT']); os.abort()"
    process = launcher.run(
        "-np", "1", "--max-restarts", "1", "--log-dir", str(tmp_path), *python(code)
    )
    _, err = process.communicate(timeout=20)
    assert process.returncode == 134, err
    for attempt in (1, 2):
        assert "slot 0" in (tmp_path / f"chief-0.attempt-{attempt}.log").read_text()


def test_a_directory_of_logs_that_cannot_be_made(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = launcher.run("-np", "1", "--log-dir", str(tmp_path / "file" / "logs"), "true")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 78, err
    assert re.match(r"hostopt: the directory '.*/file/logs' of logs cannot be made: ", err)
    assert err.endswith("Choose another --log-dir\n")


def test_a_log_that_cannot_be_written(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "chief-0.attempt-1.log").mkdir()
    process = launcher.run("-np", "1", "--log-dir", str(tmp_path), *python("print('x')"))
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "[chief:0] x\n")
    assert "no log of [chief:0] is written" in err


@pytest.mark.parametrize("code", [0, 3])
def test_hidden_lines_of_a_program_that_fails_can_be_found(
    launcher: Launcher, tmp_path: Path, code: int
) -> None:
    program = f"import sys; print('INFO:the reason', file=sys.stderr); sys.exit({code})"
    process = launcher.run("-np", "1", *python(program), TMPDIR=str(tmp_path))
    _, err = process.communicate(timeout=20)
    assert process.returncode == code
    if not code:
        assert err == "" and [*tmp_path.glob("hostopt-*")] == []
        return
    (log,) = tmp_path.glob("hostopt-logs-*/chief-0.attempt-1.log")
    assert log.read_text() == "INFO:the reason\n"
    assert re.search(rf"^hostopt: logs: +{log.parent}$", err, re.MULTILINE)


def test_the_line() -> None:
    assert describe(1, {1: TRAINING}, EVALUATION) == (
        "step 500 of 2000 (25 %), 0:15 left, 100 steps/s, 6,400 examples/s, loss 0.25, accuracy "
        "0.9 at 450, saved at 450, communication 2 ms, 75 % hidden, slowest rank 1"
    )
    resumed = {**TRAINING, "first_step": 450, "resumed_step": 450}
    assert describe(2, {1: TRAINING, 2: resumed}, {}).startswith(
        "attempt 2, resumed at 450, step 500"
    )
    assert describe(2, {1: TRAINING}, {}) == "attempt 2 starts"
    first = {"step": 3, "last_step": None}
    evaluation = {"step": 2, "metric": "loss", "value": 0.5}
    assert describe(1, {1: first}, evaluation) == "step 3, loss 0.5 at 2"
    assert "0:00 left" in describe(1, {1: {**TRAINING, "step": 2100}}, {})


def test_the_summary() -> None:
    lines = dict(summarize({1: TRAINING}, EVALUATION, 3725.0))
    assert lines == {
        "steps": "0 to 500, loss 0.25",
        "time": "1:02:05",
        "speed": "90 steps/s, 5,760 examples/s",
        "communication": "2 ms, 75 % hidden, slowest rank 1",
        "step time": " input  forward and backward  update",
        "in ms": "     1                     8       1",
        "in %": "    10                    80      10",
        "evaluation": "accuracy 0.9 at step 450; best 0.95 at step 300",
        "model_dir": "/models/digits, saved at 450",
    }
    times_ms = {"input": 5.0, "update": 5.0}
    slow = {**TRAINING, "first_step": 450, "resumed_step": 450, "times_ms": times_ms}
    lines = dict(summarize({1: TRAINING, 2: slow}, {}, 1.0))
    assert lines["steps"] == "0 to 500, loss 0.25"
    assert lines["time"] == "0:01, attempt 2 resumed at 450"
    assert lines["in %"] == "    50      50  input-bound"
    traced = {**TRAINING, "timeline": "/traces/trace.rank0.json"}
    assert dict(summarize({1: traced}, {}, 1.0))["timeline"] == "/traces/trace.rank0.json"


def test_the_newest_attempt_and_evaluation_count(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = Monitor(str(tmp_path), None, verbose=False)
    (tmp_path / "error.txt").write_text("other files are ignored")
    for attempt, step in ((1, 40), (2, 30)):
        training = {**TRAINING, "step": step}
        path = Path(shown.progress_file(("chief", 0), attempt))
        path.write_text(json.dumps({"training": training}))
    for index, step in ((0, 25), (1, 20)):
        values = {"value": step / 10, "best": step / 10, "best_step": step}
        evaluation = {"step": step, "metric": "loss", **values}
        path = Path(shown.progress_file(("evaluator", index), 1))
        path.write_text(json.dumps({"evaluation": evaluation}))
    Path(shown.progress_file(("worker", 0), 1)).write_text("{")  # not the whole file
    shown.finish(137, "worker:0: exit code 137 (SIGKILL)")
    monitor.output.flush()
    err = capfd.readouterr().err
    assert re.search("^hostopt: steps: +0 to 30, loss 0.25$", err, re.MULTILINE)
    assert re.search(r"^hostopt: evaluation: +loss 2.5 at step 25$", err, re.MULTILINE)
    assert err.splitlines()[-1].endswith("137, root cause: worker:0: exit code 137 (SIGKILL)")


def test_a_program_without_progress_has_no_summary(launcher: Launcher) -> None:
    process = launcher.run("-np", "2", *python("print('x')"))
    out, err = process.communicate(timeout=20)
    assert sorted(out.splitlines()) == ["[chief:0] x", "[worker:0] x"]
    assert err == ""


def test_progress_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "progress.json"
    monkeypatch.setenv(VARIABLE, str(path))
    write_progress("training", {"step": 1})
    write_progress("evaluation", {"step": 1})
    write_progress("training", {"step": 2})
    assert read_progress(str(path)) == {"training": {"step": 2}, "evaluation": {"step": 1}}
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert VARIABLE not in os.environ  # processes that this one starts do not write to it
    write_progress("training", {"step": object()})  # no JSON
    assert read_progress(str(path))["training"] == {"step": 2}
    monkeypatch.setenv(VARIABLE, str(tmp_path / "missing" / "progress.json"))
    write_progress("training", {"step": 3})
    assert read_progress(str(tmp_path / "missing" / "progress.json")) == {}


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ({"loss": 0.5, "accuracy": 0.25}, ("accuracy", 0.25, 1)),
        ({"loss": 0.5, "mean": 1.0}, ("loss", 0.5, -1)),
    ],
)
def test_the_main_metric(metrics: dict[str, float], shown: tuple[str, float, int]) -> None:
    assert main_metric(metrics) == shown


def test_the_line_stays_below_the_others_on_a_terminal(tmp_path: Path) -> None:
    """The task prints some lines before the line is drawn, and some once it is there."""
    seen = tmp_path / "seen"
    task = f"""
        import os, sys
        from hostopt.telemetry.progress import write_progress
        write_progress("training", {TRAINING!r})
        for number in range(10):
            print("line", number)
        while not os.path.exists({str(seen)!r}):
            pass
        for number in range(10, 20):
            print("line", number)
    """
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 60, 0, 0))
    process = Process(
        [sys.executable, "-m", "hostopt.cli", "run", "-np", "1", "--", *python(task)],
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
    )
    os.close(terminal)
    received = b""
    with contextlib.suppress(OSError):  # all processes have closed the other end
        while part := os.read(controller, 4096):
            received += part
            if b"(25 %)" in received:
                seen.touch()
    os.close(controller)
    assert process.wait(20) == 0
    rows = [row.rpartition("\x1b[K")[2] for row in received.decode().split("\r\n")]
    lines = [f"[chief:0] line {number}" for number in range(20)]
    assert [row for row in rows if "line" in row] == lines
    drawn = set(re.findall(r"\x1b\[K(step[^\r]*)", received.decode()))
    assert drawn == {"step 500 of 2000 (25 %), 0:15 left, 100 steps/s, 6,400 exam"}
    assert rows[-2].startswith("hostopt: exit code:")
