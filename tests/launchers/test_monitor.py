"""The line of a run while it trains, its summary, and which lines of tasks are shown."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from harness import ROOT, Process, python
from launcher import Launcher, lines_of
from progress_notes import TRAINING


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
    launcher.ended(
        "-np",
        "1",
        "--max-restarts",
        "1",
        "--log-dir",
        str(tmp_path),
        *python(code),
        code=134,
        limit_s=20,
    )
    for attempt in (1, 2):
        assert "slot 0" in (tmp_path / f"chief-0.attempt-{attempt}.log").read_text()


def test_a_directory_of_logs_that_cannot_be_made(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _, err = launcher.ended(
        "-np", "1", "--log-dir", str(tmp_path / "file" / "logs"), "true", code=78, limit_s=20
    )
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
    _, err = launcher.ended(
        "-np", "1", *python(program), TMPDIR=str(tmp_path), code=code, limit_s=20
    )
    if not code:
        assert err == "" and [*tmp_path.glob("hostopt-*")] == []
        return
    (log,) = tmp_path.glob("hostopt-logs-*/chief-0.attempt-1.log")
    assert log.read_text() == "INFO:the reason\n"
    assert re.search(rf"^hostopt: logs: +{log.parent}$", err, re.MULTILINE)


def test_a_program_without_progress_has_no_summary(launcher: Launcher) -> None:
    process = launcher.run("-np", "2", *python("print('x')"))
    out, err = process.communicate(timeout=20)
    assert sorted(out.splitlines()) == ["[chief:0] x", "[worker:0] x"]
    assert err == ""


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
        [sys.executable, "-m", "hostopt", "run", "-np", "1", "--", *python(task)],
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
