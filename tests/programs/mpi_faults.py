"""Breaks a collective over MPI on rank 1, in the way that the first argument names."""

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
        is_first = len(sys.argv) > 2  # the fault is in the first call, which opens the channel
        if not is_first:
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
