"""Error reports: the printed summary, the file with the traceback and the launcher's report."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hostopt.collectives.reduce_op import ReduceOp
from hostopt.errors import CollectiveMismatchError, PeerLostError
from hostopt.process import error_report
from hostopt.process.error_report import (
    cause_of,
    read_report,
    summary_of,
    write_details,
    write_report,
)


def raised(function: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as result:
        function()
    return result.value


# -- one line ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no such thing"), "ValueError: no such thing"),
        (ValueError("two\n  lines"), "ValueError: two lines"),
        (StopIteration(), "StopIteration"),
        (ValueError("x" * 3000), f"ValueError: {'x' * 988}..."),
        (CollectiveMismatchError("y" * 3000), f"CollectiveMismatchError: {'y' * 3000}"),
    ],
)
def test_the_cause_in_one_line(error: Exception, line: str) -> None:
    assert cause_of(error) == line


# -- what is printed -----------------------------------------------------------------------


def fail_in_a_handler() -> None:
    try:
        raise KeyError("while this was handled")
    except KeyError:
        int("no number")


def fail_from_a_cause() -> None:
    try:
        fail_in_a_handler()
    except ValueError as error:
        raise RuntimeError("not set up") from error


def test_an_error_of_hostopt_is_one_line() -> None:
    error = PeerLostError("rank 1\nhas left", rank=1)
    error.resume_from(None)
    assert summary_of(error, "rank 0 (chief:0)", "dir/rank_0.error.txt") == (
        "hostopt: rank 0 (chief:0): PeerLostError: rank 1 has left. Re-run the same command to "
        "resume. [traceback: dir/rank_0.error.txt]\n"
    )


def test_other_errors_are_shown_with_their_traceback() -> None:
    shown = summary_of(raised(fail_in_a_handler), "rank 1", "a file")
    assert shown.startswith("Traceback (most recent call last):\n")
    assert shown.count("Traceback") == 1
    assert 'in fail_in_a_handler\n    int("no number")' in shown
    *_, error, last = shown.splitlines()
    assert error == "ValueError: invalid literal for int() with base 10: 'no number'"
    assert last == "hostopt: rank 1 ends with this error [full traceback: a file]"


def test_the_cause_of_an_error_is_shown() -> None:
    shown = summary_of(raised(fail_from_a_cause), "rank 1", "a file")
    assert shown.count("Traceback") == 2
    assert "The above exception was the direct cause" in shown
    assert "KeyError" not in shown


def test_frames_of_libraries_are_left_out() -> None:
    def fail() -> None:
        ReduceOp("no operator")  # hostopt is a library, in which this fails

    library: dict[str, Any] = {"__package__": "tensorflow.python"}
    exec("def call(function, left):\n  call(function, left - 1) if left else function()", library)
    error = raised(lambda: library["call"](fail, 100))
    shown = summary_of(error, "rank 1", "a file")
    assert "in fail\n" in shown
    assert ", in call\n" not in shown
    assert len(shown.splitlines()) < 20
    assert ", in call\n" in error_report.details_of(error)


# -- files ---------------------------------------------------------------------------------


def test_the_file_contains_the_complete_error(tmp_path: Path) -> None:
    path = write_details(str(tmp_path / "new"), 3, raised(fail_in_a_handler))
    assert path == str(tmp_path / "new" / "rank_3.error.txt")
    text = Path(path).read_text()
    assert text.count("Traceback") == 2
    assert "KeyError: 'while this was handled'" in text


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert write_details(str(tmp_path / "file"), 0, ValueError()) is None


def test_a_hanging_disk_does_not_delay_the_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(error_report, "_WRITE_TIMEOUT_S", 0.01)
    os.mkfifo(tmp_path / "rank_0.error.txt")  # which nobody reads
    assert write_details(str(tmp_path), 0, ValueError()) is None


def test_the_launcher_learns_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "report")
    assert read_report(path) == (None, "")
    write_report(ValueError("nobody asks"), 1, None)
    monkeypatch.setenv(error_report.VARIABLE, path)
    write_report(ValueError("a\nb"), 1, "there")
    assert read_report(path) == (1, "ValueError: a b [traceback: there]")
    write_report(ValueError("c"), 74, None)
    assert read_report(path) == (74, "ValueError: c")
