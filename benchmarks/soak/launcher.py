"""`hostopt run` with short grace periods and delays; reports the exit codes of all tasks."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.soak import notes
from hostopt import __main__ as cli
from hostopt.launch import restarts, task_group

GRACE_S, KILL_S = 8.0, 1.0  # a rank takes seconds to exit if all cores are busy
STEADY_S = 5.0  # every attempt that has trained resets the delay
DESCRIPTORS = 1024  # the default of many systems; a stranger may open more connections

_classify = restarts.classify_exits


def classify_and_note(exits: Sequence[restarts.TaskExit]) -> Any:
    """Classifies the exits of an attempt, and reports them to the soak."""
    codes = {each.name.split()[0]: each.code for each in exits}
    events.add(
        "attempt", codes=codes, forced=[each.name.split()[0] for each in exits if each.forced]
    )
    return _classify(exits)


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))
    events = notes.Notes("launcher")
    restarts.classify_exits = classify_and_note
    task_group.GRACE_S = GRACE_S
    task_group.KILL_S = KILL_S
    restarts.STEADY_S = STEADY_S
    events.add("start")
    sys.exit(cli.main(sys.argv[1:]))
