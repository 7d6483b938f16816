"""Forked programs look like started ones."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from fork_server import ForkedProcess
from ranks import Rank, Ranks

PROGRAM = """
import atexit, os, signal, sys
assert "tensorflow" in sys.modules and __name__ == "__main__"
assert sys.argv[0] == __file__ and sys.path[0] == os.path.dirname(__file__)
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert sys.stdin.read() == ""
atexit.register(print, "at exit")
print(sys.argv[1], os.environ["HOSTOPT_NAME"], os.environ["TF_USE_LEGACY_KERAS"])
print("to stderr", file=sys.stderr)
exec(sys.argv[1])
"""


def start(ranks: Ranks, path: Path, code: str) -> Rank:
    program = path / "program.py"
    program.write_text(PROGRAM)
    (rank,) = ranks.start(
        str(program),
        {"worker": ["127.0.0.1:2222"]},
        arguments=[code],
        environ={"HOSTOPT_NAME": "a name"},
    )
    assert isinstance(rank.process, ForkedProcess)
    return rank


@pytest.mark.parametrize(
    ("code", "exit_code"), [("pass", 0), ("sys.exit(3)", 3), ("raise ValueError('x')", 1)]
)
def test_a_program_ends(ranks: Ranks, tmp_path: Path, code: str, exit_code: int) -> None:
    rank = start(ranks, tmp_path, code)
    assert rank.wait() == exit_code
    assert rank.process.poll() == exit_code
    assert f"{code} a name 1\nto stderr\n" in rank.output
    assert rank.output.endswith("at exit\n")
    assert ("ValueError: x" in rank.output) == (exit_code == 1)


def test_a_program_is_killed(ranks: Ranks, tmp_path: Path) -> None:
    rank = start(ranks, tmp_path, "signal.pause()")
    rank.wait_for_output("to stderr")
    assert rank.process.poll() is None
    rank.process.kill()
    assert rank.wait() == -signal.SIGKILL


def test_a_variable_that_imports_may_read_needs_a_new_interpreter(
    ranks: Ranks, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys; sys.exit('tensorflow' in sys.modules)")
    (rank,) = ranks.start(
        str(program), {"worker": ["127.0.0.1:2222"]}, environ={"TF_ENABLE_ONEDNN_OPTS": "0"}
    )
    assert rank.wait() == 0
