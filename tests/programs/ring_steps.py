"""A rank that reduces buckets step by step, checks every sum, and prints how it ended."""

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
from hostopt.collectives.call import CollectiveCall
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.errors import HostOptError, error_to_dict

_BUCKETS = 2
_RUN = 1000  # length of runs of equal values, by which a proxy finds them on the wire


def values(rank: int, step: int, length: int) -> Any:
    """Returns the integers that a rank contributes to a step; their sums are exact."""
    return np.arange(length) // _RUN + 1000.0 * (rank + 1) * (step % 7 + 1)


def are_sums(flat: Any, size: int, step: int) -> bool:
    """Returns True if each value is the sum of the values of one or more ranks."""
    inputs = [values(rank, step, flat.size) for rank in range(size)]
    is_sum = np.zeros(flat.size, bool)
    for count in range(1, size + 1):
        for some in itertools.combinations(inputs, count):
            is_sum |= flat == sum(some)
    return bool(is_sum.all())


def run(communicator: Communicator, args: argparse.Namespace, report: dict[str, Any]) -> None:
    size = communicator.size
    for step in range(args.steps):
        time.sleep(args.pause_s)
        for bucket in range(_BUCKETS):
            flat = values(communicator.rank, step, args.length)
            name = f"bucket {bucket + 1}/{_BUCKETS}"
            call = CollectiveCall(communicator.channel, step, bucket, name)
            begin_s = time.monotonic()
            try:
                communicator.all_reduce_in_place(flat, ReduceOp.SUM, call)
            except HostOptError:
                report["waited_s"] = time.monotonic() - begin_s
                report["only_sums"] = are_sums(flat, size, step)
                raise
            expected = sum(values(rank, step, args.length) for rank in range(size))
            report["exact"] = report["exact"] and np.array_equal(flat, expected)
        report["steps"] = step + 1
        if step + 1 == args.ask_after:
            print("continue?", flush=True)
            sys.stdin.readline()
    communicator.finish()
    if args.ask_at_end:
        print("done", flush=True)
        sys.stdin.readline()
    faults.trigger("after-training", communicator.rank, args.plan)
    report["unread"] = len(communicator.transport.mailbox._messages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--length", type=int, default=300_000, help="elements of a bucket")
    parser.add_argument("--pause-s", type=float, default=0.0, help="pause before each step")
    parser.add_argument("--ask-after", type=int, help="step after which to wait for a line")
    parser.add_argument("--ask-at-end", action="store_true", help="wait for a line at the end")
    parser.add_argument("--plan", type=faults.FaultPlan.from_json)
    parser.add_argument("--send-again", choices=["at-once", "later"])
    parser.add_argument("--listen", help="address to listen at behind a proxy")
    parser.add_argument("--ping-s", type=float, required=True)
    parser.add_argument("--memory-in", required=True, help="directory")
    args = parser.parse_args()
    logging.basicConfig(format="%(levelname)s %(message)s")
    faults.set_ping_times(args.ping_s)
    faults.share_memory_in(args.memory_in)
    if args.listen:
        faults.listen_at(args.listen)
    print("ready", flush=True)
    sys.stdin.readline()  # so that all ranks connect at the same time
    report: dict[str, Any] = {"steps": 0, "exact": True}
    try:
        faults.trigger("before-rendezvous", hostopt.Cluster.from_tf_config().rank, args.plan)
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
