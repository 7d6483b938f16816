"""Sleeping until another process wakes this one."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

from hostopt.collectives import futex

WAKES = """
import mmap, sys
import numpy as np
from hostopt.collectives import futex
file = open(sys.argv[1], "r+b")
memory = np.frombuffer(mmap.mmap(file.fileno(), 8), np.uint64)
while not futex.wake(memory.ctypes.data):
    pass
"""


def test_another_process_wakes_all_who_wait(tmp_path: Path) -> None:
    path = tmp_path / "word"
    path.write_bytes((2**32 + 7).to_bytes(8, "little"))
    with path.open("r+b") as file:
        word = np.frombuffer(mmap.mmap(file.fileno(), 8), np.uint64)
    waiting = threading.Thread(target=futex.wait, args=(word.ctypes.data, int(word[0]), 1e6))
    waiting.start()
    subprocess.run([sys.executable, "-c", WAKES, str(path)], check=True, timeout=60)
    waiting.join(60)
    assert not waiting.is_alive()


def test_nobody_waits_for_a_word_that_has_changed() -> None:
    word = np.array([8], np.uint64)
    futex.wait(word.ctypes.data, 7, 1e6)
    assert futex.wake(word.ctypes.data) == 0


def test_a_wait_ends_by_itself() -> None:
    word = np.array([7], np.uint64)
    futex.wait(word.ctypes.data, 7, 1e-4)
