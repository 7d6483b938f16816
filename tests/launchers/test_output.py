"""Output of tasks: prefixes, complete lines, and readers that are slow or gone."""

from __future__ import annotations

import fcntl
import os
import re
from collections import Counter

import pytest
from harness import python
from launcher import NOTE, Launcher, launched, lines_of

pytestmark = pytest.mark.usefixtures("forwarded_signals_not_ignored")

F_SETPIPE_SZ = 1031  # in the module fcntl from Python 3.10 on


def test_every_line_is_prefixed_with_its_task(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('a\\n\\nb'); print('e', file=sys.stderr); print('part', end='')"
    assert launched(python(code), size=2) == 0
    out, err = capfd.readouterr()
    for task in ("chief:0", "worker:0"):
        assert lines_of(out, task) == ["a", "", "b", "part"]
        assert lines_of(err, task) == ["e"]
    assert len(out.splitlines()) == 8
    assert out.endswith("\n")
    assert len(err.splitlines()) == 2


def test_lines_of_several_tasks_are_not_mixed(launcher: Launcher) -> None:
    code = """
        import json, os, sys
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        for _ in range(200):  # each line in several writes, more than a pipe holds
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


def test_unread_output_does_not_block_tasks(launcher: Launcher) -> None:
    code = NOTE + "print('x'); note('ready'); sys.stdin.read()\nfor _ in range(9999): print('x')"
    process = launcher.run("-np", "2", *python(code + "\nnote('done')"))
    assert process.stdout is not None
    process.stdout.close()
    launcher.pids("done", 2)
    assert process.wait(10) == 0


def test_output_that_is_never_read(launcher: Launcher) -> None:
    """Ranks continue, the exit code is correct, and dropped lines are reported later."""
    line = 1 << 20
    code = NOTE + f"for _ in range(40): print('x' * {line - 1})\nnote('done'); sys.exit(7)"
    process = launcher.run("-np", "2", "--", *python(code), reader_timeout_s=0.1)
    launcher.pids("done", 2)  # although neither standard output nor standard error is read
    out, _ = process.ended_with(7)
    dropped = sum(map(int, re.findall(r"hostopt: (\d+) lines dropped", out)))
    complete = len(lines_of(out, "chief:0")) + len(lines_of(out, "worker:0"))
    assert 15 <= complete < 80
    assert complete + dropped == 80


def test_standard_error_that_is_never_read(launcher: Launcher) -> None:
    """The launcher's log does not block it either."""
    code = NOTE + "print('x' * (1 << 23), file=sys.stderr); sys.exit(200)"
    command = ("-np", "1", "--max-restarts", "5", "--", *python(code))
    process = launcher.run(*command, reader_timeout_s=0.1)
    assert process.wait(40) == 200


def test_slowly_read_output_is_complete(launcher: Launcher) -> None:
    """The output is larger than the queue, and each line takes longer than the reader timeout."""
    code = NOTE + f"for _ in range(3): print('x' * {(8 << 20) - 1})\nnote('done')"
    process = launcher.run("-np", "1", "--", *python(code), reader_timeout_s=0.1)
    assert process.stdout is not None
    chunks = []
    while chunk := os.read(process.stdout.fileno(), 1 << 16):  # a little at a time
        chunks.append(chunk)
    assert process.wait(40) == 0
    assert b"".join(chunks).count(b"\n") == 24
    assert b"dropped" not in b"".join(chunks)
