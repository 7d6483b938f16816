"""One rank on the link: all-reduces, or plain TCP streams in both directions as the limit."""

from __future__ import annotations

import argparse
import socket
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hostopt
from benchmarks import common, network
from hostopt.measure import bench

_STREAM_PORT = 3333
_CHUNK_BYTES = 1 << 20


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
    """Sends and receives `size_bytes` at the same time over one connection, repeatedly."""
    cluster = hostopt.Cluster.from_tf_config()
    connection = _connect(cluster.rank)
    with connection:
        _both_ways(connection, size_bytes)
        before = network.sent_bytes()
        seconds = [_both_ways(connection, size_bytes) for _ in range(repetitions)]
        sent_bytes = (network.sent_bytes() - before) / repetitions
        common.report(rank=cluster.rank, seconds=seconds, sent_bytes=sent_bytes)


def _connect(rank: int | None) -> socket.socket:
    if rank == 0:
        with socket.create_server((network.ADDRESSES[0], _STREAM_PORT)) as server:
            server.settimeout(30.0)
            connection = server.accept()[0]
            connection.settimeout(60.0)
            return connection
    deadline_s = time.monotonic() + 30.0
    while True:
        try:
            return socket.create_connection((network.ADDRESSES[0], _STREAM_PORT), 60.0)
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def _both_ways(connection: socket.socket, size_bytes: int) -> float:
    connection.sendall(b"b")  # start together
    connection.recv(1)
    started_s = time.perf_counter()
    chunk, buffer = bytes(_CHUNK_BYTES), bytearray(_CHUNK_BYTES)

    def send() -> None:
        for _ in range(size_bytes // _CHUNK_BYTES):
            connection.sendall(chunk)

    sender = threading.Thread(target=send)
    sender.start()
    left_bytes = size_bytes // _CHUNK_BYTES * _CHUNK_BYTES
    while left_bytes:
        received = connection.recv_into(buffer, min(left_bytes, _CHUNK_BYTES))
        if not received:
            raise ConnectionError("the other rank has left")
        left_bytes -= received
    sender.join()
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stream", action="store_true", help="plain TCP")
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--repetitions", type=int, required=True)
    args = parser.parse_args()
    (stream if args.stream else all_reduce)(args.size, args.repetitions)


if __name__ == "__main__":
    main()
