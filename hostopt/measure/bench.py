"""Benchmark of float32 all-reduces, whose loop also times other implementations."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hostopt.collectives.call import Array
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.collectives.wire_format import new_wire_format
from hostopt.errors import ConfigError, ProtocolError
from hostopt.measure import plain_tcp
from hostopt.options import shown

_UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_BATCH_S = 0.02  # minimum duration of a repetition, so that its start is negligible
_MAX_CALLS = 1000  # maximum number in a repetition
_WARM_UP_CALLS = 3
_DIGITS = 8  # values 0..7, whose sums over up to 36 ranks are exact even in bfloat16
_COMPRESSED_TOLERANCE = 2.0**-7
_MAX_SIZE_BYTES = 64 << 30


class CommunicatorGroup:
    """Ranks of a communicator, whose buffers are arrays.

    What else is timed in the same way has these methods, and its own type of buffer.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._wire_format = new_wire_format(communicator.transport.options.compression)
        self.rank = communicator.rank
        self.size = communicator.size

    def load(self, array: Array) -> Any:
        """Converts a float32 array of shape [n] to a buffer."""
        return array

    def all_reduce(self, buffer: Any) -> Any:
        """Sums over the ranks, in place if possible, and returns the buffer."""
        call = self._communicator.next_call("the benchmark")
        self._communicator.all_reduce_in_place(buffer, ReduceOp.SUM, call, self._wire_format)
        return buffer

    def read(self, buffer: Any) -> Array:
        """Converts a buffer to an array of shape [n]."""
        return np.asarray(buffer)

    def gather(self, values: Array) -> Array:
        """Gathers float64 values of shape [n] from all ranks, as [size, n]."""
        return self._communicator.all_gather(values, "the times of the benchmark")

    def barrier(self) -> None:
        """Waits for all ranks; returns on all of them at nearly the same time."""
        self._communicator.barrier("a barrier of the benchmark")


@dataclass(frozen=True)
class Timing:
    """Times of all-reduces of one size."""

    size_bytes: int  # of float32 that each rank reduces
    seconds: tuple[float, ...]  # of one all-reduce on the slowest rank, by repetition
    processor_s: float  # of one all-reduce, on the rank that uses most
    sent_bytes: float  # payload of one all-reduce, as counted, on the busiest rank
    ring_bytes: float  # that a rank of a flat ring sends, 2 (size - 1) / size of all
    tcp_gbit: float | None = None  # per second, that plain TCP carries from rank to rank

    @property
    def median_s(self) -> float:
        """Median over the repetitions, in seconds."""
        return statistics.median(self.seconds)

    @property
    def gb_per_s(self) -> float:
        """Reduced bytes per second, in units of 1e9 bytes."""
        return self.size_bytes / self.median_s / 1e9


def run(communicator: Communicator, sizes: Sequence[int], repetitions: int) -> list[Timing]:
    """Times all-reduces of each size in bytes; returns the same timings on all ranks.

    Collective: all ranks must call it.
    """
    group, traffic = CommunicatorGroup(communicator), communicator.transport.traffic
    is_exact = communicator.transport.options.compression is None
    timings, tcp_gbit = [], plain_tcp.gbit_per_s(communicator)
    for size_bytes in sizes:
        check_sums(group, size_bytes, exact=is_exact)
        before = traffic.payload_bytes
        group.all_reduce(np.zeros(size_bytes // 4, np.float32))
        sent_bytes = group.gather(np.array([traffic.payload_bytes - before], np.float64))
        seconds, processor_s = measure(group, size_bytes, repetitions)
        ring_bytes = 2 * (group.size - 1) / group.size * size_bytes
        most_bytes = float(sent_bytes.max())
        timings.append(Timing(size_bytes, seconds, processor_s, most_bytes, ring_bytes, tcp_gbit))
    communicator.barrier("the end of the benchmark")
    return timings


def measure(
    group: CommunicatorGroup, size_bytes: int, repetitions: int
) -> tuple[tuple[float, ...], float]:
    """Times all-reduces of one size, after a warm-up. Collective: all ranks must call it.

    Returns `seconds` and `processor_s` of a `Timing`; the latter is the median of the repetitions.
    """
    buffer = group.load(np.zeros(size_bytes // 4, np.float32))  # zeros never overflow
    for _ in range(_WARM_UP_CALLS):
        once_s = _time_calls(group, buffer, 1)[0]
    calls = min(max(math.ceil(_BATCH_S / once_s), 1), _MAX_CALLS)
    repeated = [_time_calls(group, buffer, calls) for _ in range(repetitions)]
    seconds, processor_s = ([value / calls for value in column] for column in zip(*repeated))
    return tuple(seconds), statistics.median(processor_s)


def check_sums(group: CommunicatorGroup, size_bytes: int, *, exact: bool = True) -> None:
    """Reduces known values once, and checks the sums. Collective: all ranks must call it.

    Unless they must be exact, the rounding of compressed values is allowed.
    """
    digits = np.arange(size_bytes // 4, dtype=np.int64)
    values = ((digits + group.rank) % _DIGITS).astype(np.float32)
    expected = sum(((digits + rank) % _DIGITS).astype(np.float32) for rank in range(group.size))
    sums = group.read(group.all_reduce(group.load(values)))
    if not np.allclose(sums, expected, rtol=0 if exact else _COMPRESSED_TOLERANCE, atol=0):
        index = int(np.argmax(sums != expected))
        raise ProtocolError(
            f"rank {group.rank} got a wrong sum of {size_bytes} bytes: element {index} is "
            f"{sums[index]}, wanted {np.asarray(expected)[index]}",
            rank=group.rank,
        )


def format_table(timings: Sequence[Timing], line_gbit: float | None = None) -> str:
    """Formats timings as a Markdown table.

    The last column is the share of a host's line, whose speed is `line_gbit`, or of plain TCP.
    """
    gbit = line_gbit or timings[0].tcp_gbit
    of = "the line" if line_gbit else "plain TCP"
    header = ["size", "time, ms", "payload, GB/s", "processor, s/GB", "sent by a rank, bytes"]
    header += ["flat float32 ring, bytes", *([f"share of {of}"] if gbit else [])]
    lines = [f"| {' | '.join(header)} |", f"|{'--:|' * len(header)}"]
    for timing in timings:
        cells = [
            format_size(timing.size_bytes),
            f"{timing.median_s * 1e3:.3f}",
            f"{timing.gb_per_s:.3f}",
            f"{timing.processor_s / timing.size_bytes * 1e9:.2f}",
            f"{timing.sent_bytes:.0f}",
            f"{timing.ring_bytes:.0f}",
        ]
        if gbit:
            cells.append(f"{8e-9 * timing.sent_bytes / timing.median_s / gbit:.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    if gbit and not line_gbit:
        lines += ["", f"Plain TCP: {gbit:.3g} Gbit/s from rank to rank, on one connection."]
    return "\n".join(lines)


def save(path: Path, results: Sequence[Any]) -> None:
    """Writes timings or trials to a JSON file, which is overwritten; ConfigError on failure."""
    try:
        path.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            f"the times cannot be written to {path}: {error}. Give another file as --json"
        ) from None


def load(path: Path, kind: type[Any] = Timing) -> list[Any]:
    """Reads timings, or results of another kind, from a file that `save` has written."""
    return [
        kind(**{key: tuple(x) if isinstance(x, list) else x for key, x in row.items()})
        for row in json.loads(path.read_text())
    ]


def parse_size(text: str) -> int:
    """Parses a size such as 4096, 64KiB, 1MiB or 2GiB; raises ConfigError for others."""
    digits = text.strip().rstrip("KMGiBkmgb")
    unit = text.strip()[len(digits) :].upper() or "B"
    try:
        size_bytes = float(digits) * _UNITS[unit]
    except (KeyError, ValueError):
        size_bytes = 0.0
    if not 0 < size_bytes <= _MAX_SIZE_BYTES or size_bytes % 4:
        raise ConfigError(
            f"size is {shown(text)}, wanted a multiple of 4 bytes up to 64GiB. Give one such as "
            "4096, 64KiB, 1MiB or 2GiB"
        )
    return int(size_bytes)


def format_size(size_bytes: int) -> str:
    """Formats a size, such as ``64 KiB``, with the largest unit that makes it an integer."""
    for name, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def _time_calls(group: CommunicatorGroup, buffer: Any, calls: int) -> tuple[float, float]:
    """Returns seconds and processor seconds of `calls` all-reduces, each the largest of a rank."""
    group.barrier()  # all ranks start together
    started_s, processor_started_s = time.perf_counter(), time.process_time()
    for _ in range(calls):
        buffer = group.all_reduce(buffer)
    seconds = time.perf_counter() - started_s
    processor_s = time.process_time() - processor_started_s
    longest = group.gather(np.array([seconds, processor_s])).max(axis=0)
    return float(longest[0]), float(longest[1])
