"""Statuses that a rank reports, and a process that holds the lock of a model_dir."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import ROOT, Process

from hostopt import lock_file

DETAILS: dict[str, Any] = {
    "step": 7,
    "memory_bytes": 3 << 20,
    "versions": {"hostopt": "0.1.0", "python": "3.11", "tensorflow": None},
    "missing": [],
    "wait": None,
    "send": None,
    "last": {"what": "kernel", "step": 4, "ago_s": 2.0},
    "error": None,
}


def waits(peer: int, for_s: float = 9.0, what: str = "kernel") -> dict[str, Any]:
    return {**DETAILS, "wait": {"peer": peer, "what": what, "for_s": for_s}}


HOLD = """
import json, sys
from hostopt import lock_file
assert lock_file.acquire(sys.argv[1])
lock_file.note_ring(sys.argv[1], json.loads(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


class Holder:
    """A process that has locked a directory as the chief of a ring does."""

    def __init__(self, directory: Path, addresses: list[str]) -> None:
        path = directory.resolve() / lock_file.TRAINING
        self.process = Process(
            [sys.executable, "-c", HOLD, str(path), json.dumps(addresses)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Holder:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
