"""`hostopt run` that loses its patience, begins again within seconds, and tells all exit codes."""

from __future__ import annotations

import functools
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.soak import notes
from hostopt import cli, launch, restarts, task_group

GRACE_S, KILL_S = 8.0, 1.0  # a rank that ends takes seconds where all cores are busy
STEADY_S = 5.0  # every attempt that has trained begins the delays anew
DESCRIPTORS = 1024  # as many systems have it; a stranger may open more connections

_judge = restarts.judge


def judge_and_tell(endings: Sequence[restarts.Ending]) -> Any:
    """What becomes of an attempt, with the exit codes of all of its processes for the soak."""
    codes = {ending.name.split()[0]: ending.code for ending in endings}
    told.add("attempt", codes=codes, forced=[e.name.split()[0] for e in endings if e.forced])
    return _judge(endings)


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))
    told = notes.Notes("launcher")
    restarts.judge = judge_and_tell
    task_group.KILL_S = KILL_S
    restarts.STEADY_S = STEADY_S
    cli.launch = functools.partial(launch.launch, grace_s=GRACE_S)
    told.add("start")
    sys.exit(cli.main(sys.argv[1:]))
