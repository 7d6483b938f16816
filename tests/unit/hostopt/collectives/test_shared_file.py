"""Files in shared memory: reserved, attached, and gone however their makers end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hostopt.collectives.shared_file import attach, create, remove_stale


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_data_written_by_one_process_are_read_by_the_other(tmp_path: Path) -> None:
    with create(8192, str(tmp_path)) as (path, memory):
        other = attach(path, 8192)
    assert names(tmp_path) == []
    memory[8000:8003] = b"abc"
    assert other[8000:8003] == b"abc"
    assert other[0:1] == b"\0"


def test_only_this_user_may_open_it(tmp_path: Path) -> None:
    with create(4096, str(tmp_path)) as (path, _):
        assert os.stat(path).st_mode & 0o077 == 0


def test_too_much_memory_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(OSError), create(1 << 50, str(tmp_path)):
        pass
    assert names(tmp_path) == []


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    with create(4096, str(tmp_path)) as (path, _), pytest.raises(ValueError):
        attach(path, 8192)


def make_old(path: Path) -> None:
    os.utime(path, (0, 0))


def test_a_file_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import sys; from hostopt.collectives.shared_file import create\n"
        f"with create(4096, {str(tmp_path)!r}): print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as maker:
        assert maker.stdout is not None
        maker.stdout.readline()
        (left,) = tmp_path.iterdir()
        make_old(left)
        remove_stale(str(tmp_path))
        assert left.exists()  # its maker lives
        maker.send_signal(signal.SIGKILL)
        maker.wait()
    remove_stale(str(tmp_path))
    assert names(tmp_path) == []


def test_new_and_foreign_files_are_kept(tmp_path: Path) -> None:
    (tmp_path / "hostopt-young").touch()
    (tmp_path / "other").touch()
    make_old(tmp_path / "other")
    remove_stale(str(tmp_path))
    assert names(tmp_path) == ["hostopt-young", "other"]
