"""Choice of communication, segments, streams and buckets by trial on the ranks themselves.

A bucket is chosen as small as possible, so that the ring starts early in the backward pass and
little is left to reduce at its end, but large enough that the ring is still fast. Compression is
never chosen, as it changes the sums.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Callable

from hostopt.collectives.communicator import Communicator
from hostopt.measure import bench
from hostopt.options import MIB, Options

_ALTERNATIVES = ("grpc+tcp", "grpc")  # to "auto"
_SEGMENTS_BYTES = (MIB // 2, MIB, 2 * MIB, 4 * MIB)
_BUCKETS_BYTES = (MIB // 2, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB)
_REPETITIONS = 5
_SLOW_S = 0.5  # larger buckets are not tried if an all-reduce takes longer
_NEAR_PEAK = 0.8  # share of the largest throughput that a bucket has to reach
_CLEARLY_FASTER = 0.95  # share of the time of earlier trials that a later one must not exceed


@dataclass(frozen=True)
class Trial:
    """Times of all-reduces with some options."""

    communication: str
    segment_bytes: int
    streams: int  # that the ranks have used
    bucket_bytes: tuple[int, ...]  # sizes of the all-reduces
    seconds: tuple[float, ...]  # of one all-reduce of each size
    # False over MPI and in shared memory, whose speed does not depend on segments and streams
    has_segments: bool = True

    @property
    def rates(self) -> list[float]:
        """Throughput of each size, in bytes per second."""
        return [size / seconds for size, seconds in zip(self.bucket_bytes, self.seconds)]

    @property
    def best_bucket_bytes(self) -> int:
        """The smallest size whose throughput is near the largest one."""
        least = _NEAR_PEAK * max(self.rates)
        return min(size for size, rate in zip(self.bucket_bytes, self.rates) if rate >= least)

    def applied_to(self, options: Options) -> Options:
        """Returns the options with the values of this trial and its best bucket size."""
        return replace(
            options,
            communication=self.communication,
            segment_bytes=self.segment_bytes,
            streams=self.streams,
            bucket_mb=self.best_bucket_bytes / MIB,
        )


def tune(connect: Callable[[Options], Communicator], options: Options) -> list[Trial]:
    """Tries communications, then segment sizes with the fastest of them, then streams.

    Collective: all ranks must call it. The times are those of the slowest rank, so all ranks get
    the same ones.

    A `communication` other than "auto" is kept.
    """
    options = replace(options, timeline=None)
    own = options.communication
    communications = (own, *_ALTERNATIVES) if own == "auto" else (own,)
    trials = [_try(connect, replace(options, communication=each)) for each in communications]
    best = fastest(trials)
    if best.has_segments:
        options = replace(options, communication=best.communication)
        segments = [each for each in _SEGMENTS_BYTES if each != best.segment_bytes]
        trials += [_try(connect, replace(options, segment_bytes=each)) for each in segments]
        best = fastest(trials)
        options = replace(options, segment_bytes=best.segment_bytes)
        streams = {1, 2 * best.streams} - {best.streams} if options.uses_data_sockets else ()
        trials += [_try(connect, replace(options, streams=each)) for each in sorted(streams)]
    return trials


def fastest(trials: Sequence[Trial]) -> Trial:
    """Returns the fastest trial, or an earlier one that is nearly as fast."""
    best = trials[0]
    for trial in trials[1:]:
        ratios = [after / before for after, before in zip(trial.seconds, best.seconds)]
        if statistics.geometric_mean(ratios) < _CLEARLY_FASTER:
            best = trial
    return best


def format_variables(trial: Trial) -> str:
    """Formats the choice as environment variables, for a shell."""
    options = trial.applied_to(Options())
    return (
        f"HOSTOPT_COMMUNICATION={options.communication} "
        f"HOSTOPT_SEGMENT_BYTES={options.segment_bytes} HOSTOPT_STREAMS={options.streams} "
        f"HOSTOPT_BUCKET_MB={options.bucket_mb:g}"
    )


def format_table(trials: Sequence[Trial]) -> str:
    """Formats the throughputs as a Markdown table with a row for each trial."""
    sizes = max((trial.bucket_bytes for trial in trials), key=len)
    header = ["communication", "segment", "streams"]
    header += [f"{bench.format_size(size)}, GB/s" for size in sizes]
    lines = [f"| {' | '.join(header)} |", f"|---|--:|--:|{'--:|' * len(sizes)}"]
    for trial in trials:
        rates = [f"{rate / 1e9:.3f}" for rate in trial.rates]
        cells = [trial.communication, bench.format_size(trial.segment_bytes)]
        cells += [str(trial.streams), *rates]
        cells += ["-"] * (len(header) - len(cells))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _try(connect: Callable[[Options], Communicator], options: Options) -> Trial:
    seconds: list[float] = []
    with connect(options) as communicator:
        transport = communicator.transport
        if communicator.rank == 0:
            size = bench.format_size(transport.segment_bytes)
            sys.stderr.write(
                f"hostopt: trial of {options.communication}, segments of {size}, "
                f"{transport.streams} stream(s)\n"
            )
        group = bench.CommunicatorGroup(communicator)
        for size_bytes in _BUCKETS_BYTES:
            if not seconds or seconds[-1] < _SLOW_S:
                repetitions, _ = bench.measure(group, size_bytes, _REPETITIONS)
                seconds.append(min(repetitions))  # the least disturbed one
        communicator.barrier("the end of a trial")
    return Trial(
        options.communication,
        transport.segment_bytes,
        transport.streams,
        _BUCKETS_BYTES[: len(seconds)],
        tuple(seconds),
        has_segments=not communicator.on_one_host and communicator.world is None,
    )
