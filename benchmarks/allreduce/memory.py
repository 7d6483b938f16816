"""Memory of one rank that reduces 64 MiB of gradients in buckets, or only holds them."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import hostopt
from benchmarks import common, reducing

STEPS, PARTS, PART_BYTES = 5, 16, 4 << 20


def peak_bytes() -> int:
    """Returns the peak resident memory of this process, including shared memory it has touched."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", text)[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without", action="store_true", help="hold gradients, reduce nothing")
    args = parser.parse_args()
    gradients = [np.ones(PART_BYTES // 4, np.float32) for _ in range(PARTS)]
    with hostopt.connect() as communicator:
        communicator.barrier()
        if not args.without:
            parts = reducing.Gradients(communicator, gradients)
            for _ in range(STEPS):
                sums = parts.reduce()
                if any(part[0] != communicator.size for bucket in sums for part in bucket):
                    raise RuntimeError("a sum is wrong")
                del sums
        communicator.barrier()
        common.report(peak_bytes=peak_bytes(), gradient_bytes=PARTS * PART_BYTES)


if __name__ == "__main__":
    main()
