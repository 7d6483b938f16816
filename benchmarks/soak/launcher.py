"""`hostopt run` that loses its patience, and begins again, within seconds."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hostopt import cli, launch, restarts, task_group

GRACE_S, KILL_S = 4.0, 1.0
STEADY_S = 5.0  # every attempt that has trained begins the delays anew

if __name__ == "__main__":
    task_group.KILL_S = KILL_S
    restarts.STEADY_S = STEADY_S
    cli.launch = functools.partial(launch.launch, grace_s=GRACE_S)
    sys.exit(cli.main(sys.argv[1:]))
