"""Breaks a collective over MPI on rank 1, in the way that the first argument names.

The second argument is the number of equal calls before: 0, and the call opens the channel; 1, and
the ranks compare the call; 3, the default, and they expect another one like those before.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

import hostopt

KIND = sys.argv[1]
VALUES = np.ones(1 << 16, np.float32)


def print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")  # at once, or mpirun may join it with other lines
    sys.stdout.flush()


def call(communicator: hostopt.Communicator) -> None:
    """Makes a call that differs on rank 1."""
    if communicator.rank != 1:
        communicator.all_reduce(VALUES, name="w")
    elif KIND == "dtype":
        communicator.all_reduce(VALUES.astype(np.float64), name="w")
    elif KIND == "shape":
        communicator.all_reduce(VALUES[:100], name="w")
    elif KIND == "operator":
        communicator.all_reduce(VALUES, hostopt.ReduceOp.MAX, name="w")
    elif KIND == "name":
        communicator.all_reduce(VALUES, name="v")
    elif KIND == "collective":
        communicator.all_gather(VALUES, name="w")
    elif KIND == "over the ring":
        communicator.gather_bytes(b"", name="w")
    elif KIND == "exception":
        raise ValueError("raised on purpose")
    elif KIND == "stuck":
        time.sleep(600)  # until mpirun ends this process
    elif KIND in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, KIND))
        communicator.all_reduce(VALUES, name="w")
    else:
        assert KIND == "left"


def main() -> None:
    timeout_s = 2.0 if KIND == "stuck" else 60.0
    options = hostopt.Options(
        communication="mpi", stall_warning_s=0.5, collective_timeout_s=timeout_s
    )
    with hostopt.connect(options=options) as communicator:
        rank = communicator.rank
        for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 3):
            communicator.all_reduce(VALUES, name="w")
        print_line(f"pid {rank} {os.getpid()}")
        began_s = time.monotonic()
        try:
            call(communicator)
        except hostopt.HostOptError as error:
            print_line(f"rank {rank} after {time.monotonic() - began_s:.1f} s: {error!r}")
            raise
    print_line(f"rank {rank} has ended")


if __name__ == "__main__":
    main()
