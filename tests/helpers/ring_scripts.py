"""Programs of ranks, as source."""

from __future__ import annotations

# First lines of each script.
MEET = """
import dataclasses, logging, os, signal, sys
import numpy as np
import hostopt
from hostopt.transport.grpc import ring as grpc_ring

logging.basicConfig(stream=sys.stdout, format="%(message)s")
if "PROGRESS_EVERY_S" in os.environ:
    interval_s = float(os.environ["PROGRESS_EVERY_S"])
    grpc_ring.DEFAULT = dataclasses.replace(grpc_ring.DEFAULT, progress_every_s=interval_s)
communicator = hostopt.connect()
rank, size = communicator.rank, communicator.size
def say(line):
    print(line, flush=True)
"""
