"""File descriptors: the raised limit, and errors if none is left."""

from __future__ import annotations

from rings import NewRing

from hostopt.errors import ResourceError

SCRIPT = """
import os, resource, sys
import numpy as np
import hostopt
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 777))
communicator = hostopt.connect()
print(*resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
assert communicator.all_reduce(np.ones(9))[0] == 2
sys.stdin.readline()
if communicator.rank == 1:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    open(os.devnull)
communicator.barrier()
"""


def test_the_limit_is_raised_and_a_rank_without_descriptors_may_be_started_again(
    processes: NewRing,
) -> None:
    ring = processes(2)
    started = ring.start_all(SCRIPT)
    for process in started:
        process.expect("777 777")
        process.write_line("continue")
    for process in started:
        assert process.exit_code() == ResourceError.exit_code, process.stderr
    assert f"ResourceError: {ring.name(1)} stopped with an error" in started[0].stderr
    assert "no file descriptor is left ([Errno 24] Too many open files" in started[0].stderr
    assert "Raise the limit, for example by `ulimit -n`" in started[0].stderr
