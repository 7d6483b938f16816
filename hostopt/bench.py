"""Times float32 all-reduces over the ranks of a ring, or of anything else shaped like one."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hostopt.communicator import Communicator, ReduceOp
from hostopt.compression import new_wire_format
from hostopt.connect import connect
from hostopt.errors import ConfigError, ProtocolError
from hostopt.options import shown
from hostopt.ring import Array

__all__: list[str] = []

_UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_BATCH_S = 0.02  # a repetition lasts at least this long, so that its beginning does not count
_MAX_CALLS = 1000  # in a repetition
_WARM_UP_CALLS = 3
_DIGITS = 8  # values 0..7: their sums over 36 ranks are whole in bfloat16 too
_COMPRESSED_TOLERANCE = 2.0**-7
_MAX_SIZE_BYTES = 64 << 30


class Group(Protocol):
    """What can be timed: ranks that reduce, each with buffers of its own kind."""

    @property
    def rank(self) -> int:
        """This rank, 0..size-1."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def load(self, array: Array) -> Any:
        """Turn a float32 array of shape [n] into a buffer."""

    def all_reduce(self, buffer: Any) -> Any:
        """Sum over the ranks, in place where that is possible, and return the buffer."""

    def read(self, buffer: Any) -> Array:
        """Turn a buffer into an array of shape [n]."""

    def gather(self, values: Array) -> Array:
        """Collect float64 values of shape [n] from all ranks, as [size, n]."""

    def barrier(self) -> None:
        """Return once every rank has called this, on all ranks at nearly the same time."""


class RingGroup:
    """The ranks of a communicator.

    Args:
      communicator: whose all-reduce is timed.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._wire_format = new_wire_format(communicator.transport.options.compression)
        self.rank = communicator.rank
        self.size = communicator.size

    def load(self, array: Array) -> Array:
        """Return the array itself."""
        return array

    def all_reduce(self, buffer: Array) -> Array:
        """Sum in place."""
        operation = self._communicator.operation("the benchmark")
        self._communicator.all_reduce_in_place(buffer, ReduceOp.SUM, operation, self._wire_format)
        return buffer

    def read(self, buffer: Array) -> Array:
        """Return the array itself."""
        return buffer

    def gather(self, values: Array) -> Array:
        """Collect the values of all ranks."""
        return self._communicator.all_gather(values, "the times of the benchmark")

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._communicator.barrier("a barrier of the benchmark")


@dataclass(frozen=True)
class Timing:
    """How long all-reduces of one size took.

    Args:
      size_bytes: bytes of float32 that each rank reduces.
      seconds: of one all-reduce by repetition, on the slowest rank.
      sent_bytes: payload that the transport counted for one all-reduce, on the busiest rank.
      ring_bytes: bytes of float32 that a rank of a flat ring sends, 2 (size - 1) / size of all.
    """

    size_bytes: int
    seconds: tuple[float, ...]
    sent_bytes: float
    ring_bytes: float

    @property
    def median_s(self) -> float:
        """Median over the repetitions, in seconds."""
        return statistics.median(self.seconds)

    @property
    def gb_per_s(self) -> float:
        """Payload, that is bytes reduced by time, in 1e9 bytes a second."""
        return self.size_bytes / self.median_s / 1e9


def run(sizes: Sequence[int], repetitions: int) -> tuple[int, list[Timing]]:
    """Meet the ranks of TF_CONFIG, and time all-reduces of each size.

    Args:
      sizes: bytes, each a multiple of 4.
      repetitions: timed repetitions of each size.

    Returns:
      This rank, and one timing for each size, the same on all ranks.

    Raises:
      HostOptError: a rank failed, an option cannot be used, or a sum is wrong.
    """
    with connect() as communicator:
        timings = [_time(communicator, size_bytes, repetitions) for size_bytes in sizes]
        communicator.barrier("the end of the benchmark")
        return communicator.rank, timings


def measure(group: Group, size_bytes: int, repetitions: int) -> tuple[tuple[float, ...], int]:
    """Time all-reduces of one size, without those that warm up or check the sums.

    Args:
      group: the ranks; all of them call this.
      size_bytes: bytes of float32, a multiple of 4.
      repetitions: timed repetitions.

    Returns:
      Seconds of one all-reduce by repetition, on the slowest rank, and the number of all-reduces
      that each repetition made.
    """
    buffer = group.load(np.zeros(size_bytes // 4, np.float32))  # zeros never overflow
    for _ in range(_WARM_UP_CALLS):
        once_s = max(_time_calls(group, buffer, 1))
    calls = min(max(math.ceil(_BATCH_S / once_s), 1), _MAX_CALLS)
    rows = [_time_calls(group, buffer, calls) for _ in range(repetitions)]
    return tuple(max(row) / calls for row in rows), calls


def check_sums(group: Group, size_bytes: int, *, exact: bool = True) -> None:
    """Reduce known values once.

    Args:
      group: the ranks; all of them call this.
      size_bytes: bytes of float32, a multiple of 4.
      exact: False allows for the rounding of compressed values.

    Raises:
      ProtocolError: a sum is wrong.
    """
    digits = np.arange(size_bytes // 4, dtype=np.int64)
    values = ((digits + group.rank) % _DIGITS).astype(np.float32)
    wanted = sum(((digits + rank) % _DIGITS).astype(np.float32) for rank in range(group.size))
    found = group.read(group.all_reduce(group.load(values)))
    if not np.allclose(found, wanted, rtol=0 if exact else _COMPRESSED_TOLERANCE, atol=0):
        index = int(np.argmax(found != wanted))
        raise ProtocolError(
            f"rank {group.rank} got a wrong sum of {size_bytes} bytes: element {index} is "
            f"{found[index]}, wanted {np.asarray(wanted)[index]}",
            rank=group.rank,
        )


def format_table(timings: Sequence[Timing]) -> str:
    """Write timings as a Markdown table.

    Args:
      timings: one for each row.

    Returns:
      Lines of text.
    """
    lines = [
        "| size | time, ms | payload, GB/s | sent by a rank, bytes | flat float32 ring, bytes |",
        "|--:|--:|--:|--:|--:|",
    ]
    for timing in timings:
        cells = (
            format_size(timing.size_bytes),
            f"{timing.median_s * 1e3:.3f}",
            f"{timing.gb_per_s:.3f}",
            f"{timing.sent_bytes:.0f}",
            f"{timing.ring_bytes:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def save(path: Path, timings: Sequence[Timing]) -> None:
    """Write timings to a JSON file.

    Args:
      path: the file; overwritten.
      timings: what to write.

    Raises:
      ConfigError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps([asdict(timing) for timing in timings], indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            f"the times cannot be written to {path}: {error}. Give another file as --json"
        ) from None


def load(path: Path) -> list[Timing]:
    """Read what `save` wrote.

    Args:
      path: the file.

    Returns:
      The timings.
    """
    rows = json.loads(path.read_text())
    return [Timing(**{**row, "seconds": tuple(row["seconds"])}) for row in rows]


def parse_size(text: str) -> int:
    """Read a size such as 4096, 64KiB, 1MiB or 2GiB.

    Args:
      text: a whole number of bytes, or a number and a unit.

    Returns:
      Bytes.

    Raises:
      ConfigError: it is no size, or not one of whole float32 values.
    """
    digits = text.strip().rstrip("KMGiBkmgb")
    unit = text.strip()[len(digits) :].upper() or "B"
    size_bytes = float(digits) * _UNITS[unit] if _is_number(digits) and unit in _UNITS else 0.0
    if not 0 < size_bytes <= _MAX_SIZE_BYTES or size_bytes % 4:
        raise ConfigError(
            f"size is {shown(text)}, wanted a multiple of 4 bytes up to 64GiB. Give one such as "
            "4096, 64KiB, 1MiB or 2GiB"
        )
    return int(size_bytes)


def format_size(size_bytes: int) -> str:
    """Write a size with the largest unit that leaves it whole.

    Args:
      size_bytes: bytes.

    Returns:
      Text such as ``64 KiB``.
    """
    for name, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def _time(communicator: Communicator, size_bytes: int, repetitions: int) -> Timing:
    group = RingGroup(communicator)
    check_sums(group, size_bytes, exact=communicator.transport.options.compression is None)
    sent_bytes = _count_sent(communicator, group, size_bytes)
    seconds, _ = measure(group, size_bytes, repetitions)
    ring_bytes = 2 * (group.size - 1) / group.size * size_bytes
    return Timing(size_bytes, seconds, sent_bytes, ring_bytes)


def _count_sent(communicator: Communicator, group: RingGroup, size_bytes: int) -> float:
    traffic = communicator.transport.traffic
    before = traffic.payload_bytes
    group.all_reduce(np.zeros(size_bytes // 4, np.float32))
    sent = np.array([traffic.payload_bytes - before], np.float64)
    return float(group.gather(sent).max())


def _time_calls(group: Group, buffer: Any, calls: int) -> list[float]:
    """Seconds that `calls` all-reduces take on each rank."""
    group.barrier()  # all begin together
    started_s = time.perf_counter()
    for _ in range(calls):
        buffer = group.all_reduce(buffer)
    seconds = time.perf_counter() - started_s
    return [float(row[0]) for row in group.gather(np.array([seconds]))]


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
