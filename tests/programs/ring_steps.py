"""One rank that sums buckets step by step, checks every sum, and prints how it ended."""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import time
from typing import Any

import faults
import numpy as np

import hostopt
from hostopt.communicator import Communicator, ReduceOp
from hostopt.errors import HostOptError, error_to_dict
from hostopt.ring import Operation

_BUCKETS = 2
_RUN = 1000  # so many neighbours are equal, by which a proxy finds them on the wire


def values(rank: int, step: int, length: int) -> Any:
    """What a rank gives: whole numbers, of which any sum is exact, other ones everywhere."""
    return np.arange(length) // _RUN + 1000.0 * (rank + 1) * (step % 7 + 1)


def are_sums(flat: Any, size: int, step: int) -> bool:
    """True where each value is the sum of what some of the ranks have given."""
    given = [values(rank, step, flat.size) for rank in range(size)]
    found = np.zeros(flat.size, bool)
    for count in range(1, size + 1):
        for some in itertools.combinations(given, count):
            found |= flat == sum(some)
    return bool(found.all())


def run(communicator: Communicator, args: argparse.Namespace, report: dict[str, Any]) -> None:
    size = communicator.size
    for step in range(args.steps):
        time.sleep(args.pause_s)
        for bucket in range(_BUCKETS):
            flat = values(communicator.rank, step, args.length)
            what = f"bucket {bucket + 1}/{_BUCKETS}"
            operation = Operation(communicator.channel, step, bucket, what)
            begin_s = time.monotonic()
            try:
                communicator.all_reduce_in_place(flat, ReduceOp.SUM, operation)
            except HostOptError:
                report["waited_s"] = time.monotonic() - begin_s
                report["only_sums"] = are_sums(flat, size, step)
                raise
            wanted = sum(values(rank, step, args.length) for rank in range(size))
            report["exact"] = report["exact"] and np.array_equal(flat, wanted)
        report["steps"] = step + 1
        if step + 1 == args.ask_after:
            print("go on?", flush=True)
            sys.stdin.readline()
    communicator.finish()
    if args.ask_at_end:
        print("done", flush=True)
        sys.stdin.readline()
    faults.strike("after-training", communicator.rank, args.plan)
    report["unread"] = len(communicator.transport.mailbox._messages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--length", type=int, default=300_000, help="elements of a bucket")
    parser.add_argument("--pause-s", type=float, default=0.0, help="what a step computes")
    parser.add_argument("--ask-after", type=int, help="step after which to wait for a line")
    parser.add_argument("--ask-at-end", action="store_true", help="wait for a line, when done")
    parser.add_argument("--plan", type=faults.FaultPlan.from_json)
    parser.add_argument("--send-again", choices=["at-once", "later"])
    parser.add_argument("--listen", help="own address, where a proxy has that of the cluster")
    parser.add_argument("--ping-s", type=float, required=True)
    parser.add_argument("--memory-in", required=True, help="directory")
    args = parser.parse_args()
    logging.basicConfig(format="%(levelname)s %(message)s")
    faults.set_ping_times(args.ping_s)
    faults.share_memory_in(args.memory_in)
    if args.listen:
        faults.listen_at(args.listen)
    print("here", flush=True)
    sys.stdin.readline()  # all ranks meet at the same time, however long each took to start
    report: dict[str, Any] = {"steps": 0, "exact": True}
    try:
        faults.strike("before-meeting", hostopt.Cluster.from_tf_config().rank, args.plan)
        communicator = hostopt.connect()
        faults.inject(communicator, args.plan)
        if args.send_again:
            faults.send_again(communicator, args.send_again)
        run(communicator, args, report)
    except HostOptError as error:
        report["error"] = error_to_dict(error)
        raise
    finally:
        print(json.dumps(report), flush=True)


main()
