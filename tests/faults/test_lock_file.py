"""Lock files: one process holds the lock, until it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from harness import ROOT, is_gone, python, until

from hostopt import lock_file

HOLD = """
import os, subprocess, sys, time
from hostopt import lock_file
assert lock_file.acquire(sys.argv[1])
"""
# What lives on when its parent is killed.
CHILDREN = {
    "none": "print('held', flush=True)",
    "fork": """
if os.fork() == 0:
    print("held", flush=True)
""",
    "multiprocessing": """
import multiprocessing
def child():
    print("held", flush=True)
    time.sleep(100)
multiprocessing.get_context("fork").Process(target=child).start()
""",
    "program": """
subprocess.Popen(["sh", "-c", "echo held; sleep 100"], close_fds=False)
""",
}

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "lock")


@pytest.fixture
def start(path: str) -> Iterator[Start]:
    """`start(child)`: a process that holds the lock, in a process group of its own."""
    started: list[subprocess.Popen[str]] = []

    def start_one(child: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*python(HOLD + CHILDREN[child] + "\ntime.sleep(100)"), path],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start_one
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def acquire_elsewhere(path: str) -> bool:
    """What `acquire` returns in another process."""
    code = "import sys; from hostopt import lock_file; sys.exit(lock_file.acquire(sys.argv[1]))"
    return bool(subprocess.call([*python(code), path], cwd=ROOT))


def test_one_process_holds_the_lock_and_is_named(path: str) -> None:
    assert not lock_file.is_held(path)
    assert lock_file.last_holder(path) is None
    assert lock_file.acquire(path)
    assert lock_file.acquire(path)  # once more
    assert not acquire_elsewhere(path)
    holder = lock_file.last_holder(path)
    assert holder is not None and holder.pid == os.getpid()
    assert (holder.host, holder.start[-4:]) == (os.uname().nodename, " UTC")
    assert not holder.is_elsewhere
    assert replace(holder, boot_id="of another kernel").is_elsewhere
    lock_file.release(path)
    assert lock_file.is_held(path)
    assert not acquire_elsewhere(path)
    lock_file.release(path)
    assert not lock_file.is_held(path)
    assert acquire_elsewhere(path)
    assert os.path.exists(path)


def test_copying_the_directory_does_not_release_the_lock(tmp_path: Path, path: str) -> None:
    assert lock_file.acquire(path)
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert lock_file.is_held(path)
    assert not acquire_elsewhere(path)
    lock_file.release(path)


@pytest.mark.parametrize("child", CHILDREN)
def test_killing_the_holder_releases_the_lock_although_its_children_live(
    start: Start, path: str, child: str
) -> None:
    process = start(child)
    children = psutil.Process(process.pid).children()
    assert len(children) == (child != "none")
    assert not lock_file.acquire(path)
    holder = lock_file.last_holder(path)
    assert holder is not None and holder.pid == process.pid
    process.kill()
    process.wait()
    assert not lock_file.is_held(path)
    assert lock_file.acquire(path)
    assert not any(is_gone(each.pid) for each in children)
    lock_file.release(path)


def test_a_forked_child_does_not_hold_the_lock_and_cannot_acquire_it(path: str) -> None:
    assert lock_file.acquire(path)
    child = os.fork()
    if child == 0:
        lock_file.release(path)  # as a `with` does that the child leaves
        os._exit(lock_file.acquire(path))
    assert os.waitpid(child, 0)[1] == 0
    assert lock_file.is_held(path)
    lock_file.release(path)
    until(lambda: not lock_file.is_held(path), "end of the lock")


def test_a_deleted_file_is_locked_again(start: Start, path: str) -> None:
    assert lock_file.keep(path)  # nothing happens
    assert not os.path.exists(path)
    for _ in range(2):
        assert lock_file.acquire(path)
    assert lock_file.keep(path)
    os.unlink(path)
    assert lock_file.keep(path)
    lock_file.release(path)
    assert not acquire_elsewhere(path)
    os.unlink(path)
    start("none")
    assert not lock_file.keep(path)
    lock_file.release(path)
    assert lock_file.is_held(path)  # by the other one


@pytest.mark.parametrize("text", ["", "{}", "[1]", "no JSON", '{"host": 1, "pid": "x"}', "\xff"])
def test_an_empty_file(path: str, text: str) -> None:
    Path(path).write_bytes(text.encode("latin-1"))
    assert lock_file.last_holder(path) is None
    assert lock_file.acquire(path)
    assert lock_file.last_holder(path) is not None
    lock_file.release(path)


def test_fields_of_a_later_release_are_left_out(path: str) -> None:
    Path(path).write_text('{"host": "h", "boot_id": "b", "pid": 1, "start": "s", "new": {}}')
    assert lock_file.last_holder(path) == lock_file.Holder("h", "b", 1, "s")


@pytest.mark.parametrize(("mode", "expected"), [(0o770, 0o660), (0o700, 0o600), (0o2777, 0o666)])
def test_write_permission_to_the_directory_suffices(
    tmp_path: Path, path: str, mode: int, expected: int
) -> None:
    tmp_path.chmod(mode)
    assert lock_file.acquire(path)
    lock_file.release(path)
    assert os.stat(path).st_mode & 0o777 == expected


def test_addresses_of_a_ring_are_noted_for_others(path: str) -> None:
    lock_file.note_ring(path, ["h:1"])  # this process has not locked it
    assert not os.path.exists(path)
    addresses = [f"h{number}:{number}" for number in range(1, 9)]
    assert lock_file.acquire(path)
    first = lock_file.last_holder(path)
    lock_file.note_ring(path, addresses)
    noted = lock_file.last_holder(path)
    assert first is not None and noted == replace(first, ring=("h1:1", "h2:2", "h3:3"))
    os.remove(path)
    assert lock_file.keep(path)  # writes it again
    again = lock_file.last_holder(path)
    assert again is not None and again.ring == noted.ring
    lock_file.release(path)
    assert lock_file.acquire(path)  # another training of this process
    last = lock_file.last_holder(path)
    assert last is not None and last.ring == ()
    lock_file.release(path)


@pytest.mark.parametrize(
    "ring", ["1", "[1, null]", '["\\u001b:1"]', '["host"]', '{"h:0": 1}', '"h:1"']
)
def test_addresses_that_are_none_are_not_read(path: str, ring: str) -> None:
    with open(path, "w") as file:
        file.write(f'{{"host": "h", "boot_id": "b", "pid": 1, "start": "s", "ring": {ring}}}')
    holder = lock_file.last_holder(path)
    assert holder is None or holder.ring == ()
