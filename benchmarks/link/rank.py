"""One rank on the link: all-reduces, or plain TCP streams in both directions as the limit."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hostopt
from benchmarks import common, network
from hostopt.measure import bench
from hostopt.measure.plain_tcp import PlainTcp


def all_reduce(size_bytes: int, repetitions: int) -> None:
    """Times all-reduces, and counts the bytes that each sends with the interface counter."""
    with hostopt.connect() as communicator:
        group = bench.CommunicatorGroup(communicator)
        compressed = communicator.transport.options.compression is not None
        bench.check_sums(group, size_bytes, exact=not compressed)
        communicator.barrier()
        before = network.sent_bytes()
        bench.check_sums(group, size_bytes, exact=not compressed)
        communicator.barrier()  # wait for the acknowledgements of the peer
        sent_bytes = network.sent_bytes() - before
        seconds, _ = bench.measure(group, size_bytes, repetitions)
        communicator.barrier()
        common.report(rank=communicator.rank, seconds=seconds, sent_bytes=sent_bytes)


def stream(size_bytes: int, repetitions: int) -> None:
    """Sends and receives `size_bytes` at the same time, repeatedly."""
    with hostopt.connect() as communicator, PlainTcp(communicator) as streams:
        streams.seconds(size_bytes)
        before = network.sent_bytes()
        seconds = [streams.seconds(size_bytes) for _ in range(repetitions)]
        sent_bytes = (network.sent_bytes() - before) / repetitions
        common.report(rank=communicator.rank, seconds=seconds, sent_bytes=sent_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stream", action="store_true", help="plain TCP")
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--repetitions", type=int, required=True)
    args = parser.parse_args()
    (stream if args.stream else all_reduce)(args.size, args.repetitions)


if __name__ == "__main__":
    main()
