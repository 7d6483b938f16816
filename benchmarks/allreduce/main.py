"""All-reduce of float32 with hostopt and its peers, in interleaved rounds on this machine."""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import certificates, common
from hostopt.measure import bench

HERE = Path(__file__).resolve().parent
SIZES = ("4KiB", "64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB")


@dataclass(frozen=True)
class Way:
    """A way in which ranks of hostopt communicate.

    Args:
      communication: the option of that name.
      compression: the option of that name.
      tls: True for mutual TLS.
    """

    communication: str
    compression: str = "none"
    tls: bool = False

    @property
    def is_plain(self) -> bool:
        """True for uncompressed data without TLS."""
        return self.compression == "none" and not self.tls

    def command(self, np: int, *command: object) -> list[object]:
        """Returns the command that starts `np` ranks on this machine."""
        if self.communication != "mpi":
            return common.hostopt_run(np, *command)
        return common.mpirun(np, sys.executable, "-m", "hostopt", "exec", "--", *command)

    @contextmanager
    def environ(self) -> Iterator[dict[str, str]]:
        """Yields environment variables of the ranks, and deletes their certificates afterwards."""
        result = {
            **common.SAME_THREADS,
            "HOSTOPT_COMMUNICATION": self.communication,
            "HOSTOPT_COMPRESSION": self.compression,
        }
        with tempfile.TemporaryDirectory() as directory:
            if self.tls:
                result["HOSTOPT_TLS_DIR"] = certificates.write_tls_dir(directory)
            yield result


class Cost(NamedTuple):
    """Cost of an all-reduce.

    Args:
      seconds: its time.
      processor_s: processor time of a rank, in seconds.
    """

    seconds: float
    processor_s: float


OURS = {
    "hostopt grpc+tcp": Way("grpc+tcp"),
    "hostopt grpc": Way("grpc"),
    "hostopt grpc+tcp TLS": Way("grpc+tcp", tls=True),
    "hostopt grpc+tcp bf16": Way("grpc+tcp", "bf16"),
    "hostopt grpc+tcp fp16": Way("grpc+tcp", "fp16"),
    "hostopt shm": Way("shm"),
    "hostopt mpi": Way("mpi"),
}
TITLES = {
    **{name: name for name in OURS},
    "tf": "TensorFlow RING",
    "gloo": "Gloo TCP",
    "mpi": "OpenMPI",
    "mpi4py": "MPI_Iallreduce and MPI_Wait",
}
RATIOS = (
    ("hostopt grpc+tcp", "hostopt grpc"),
    ("hostopt grpc+tcp", "gloo"),
    ("hostopt grpc+tcp", "tf"),
    ("hostopt grpc+tcp TLS", "hostopt grpc+tcp"),
    ("hostopt shm", "mpi"),
    ("hostopt mpi", "mpi4py"),
)
_TIMEOUT_S = 300.0
Costs = dict[int, Cost]  # by size


def measure_hostopt(way: Way, np: int, sizes: list[int], repetitions: int) -> list[bench.Timing]:
    """Times the all-reduces of hostopt once, with `hostopt bench`."""
    with tempfile.TemporaryDirectory() as directory, way.environ() as environ:
        path = Path(directory, "times.json")
        command = [sys.executable, "-m", "hostopt", "bench", "--quiet"]
        command += ["--json", path, "--repetitions", repetitions, "--sizes", *sizes]
        common.run(way.command(np, *command), _TIMEOUT_S, environ)
        return bench.load(path)


def costs_of_ours(*args: Any) -> Costs:
    timings = measure_hostopt(*args)
    return {timing.size_bytes: Cost(timing.median_s, timing.processor_s) for timing in timings}


def measure_peer(peer: str, python: Path, np: int, sizes: list[int], repetitions: int) -> Costs:
    """Times the ranks of a peer once."""
    with tempfile.TemporaryDirectory() as directory:
        command: list[object] = [python, HERE / "peer.py", "--peer", peer]
        command += ["--store", Path(directory, "store"), "--repetitions", repetitions]
        command += ["--sizes", *sizes]
        start = common.mpirun if peer in ("mpi", "mpi4py") else common.hostopt_run
        environ = {**common.SAME_THREADS, "GLOO_SOCKET_IFNAME": "lo"}
        (result,) = common.results_in(common.run(start(np, *command), _TIMEOUT_S, environ), 1)
    return {int(size): Cost(*measured) for size, measured in result["measured"].items()}


def measure_memory(way: Way | None) -> float:
    """Returns the peak resident bytes of a rank that reduces 64 MiB, the larger of two ranks."""
    command = [sys.executable, HERE / "memory.py", *([] if way else ["--without"])]
    start = way.command if way else common.hostopt_run
    with way.environ() if way else nullcontext(common.SAME_THREADS) as environ:
        text = common.run(start(2, *command), _TIMEOUT_S, environ)
    results = common.results_in(text, 2)
    return max(r["peak_bytes"] for r in results) / results[0]["gradient_bytes"]


def find_systems(args: argparse.Namespace, np: int = 2) -> dict[str, Callable[[], Costs]]:
    result: dict[str, Callable[[], Costs]] = {}
    for name in args.systems:
        if name in ("hostopt mpi", "mpi4py") and not common.has_mpi():
            continue
        if name in OURS:
            measure = functools.partial(costs_of_ours, OURS[name])
        else:
            is_here = name in ("tf", "mpi4py")
            python = Path(sys.executable) if is_here else common.peer_python(name)
            if python is None:
                continue
            measure = functools.partial(measure_peer, name, python)
        result[name] = functools.partial(measure, np, args.sizes, args.repetitions)
    return result


def measure_more_ranks(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures uncompressed systems on more ranks."""
    result = []
    for np in args.np:
        systems = {
            name: measure
            for name, measure in find_systems(args, np).items()
            if name == "gloo" or (name in OURS and OURS[name].is_plain)
        }
        for name, rounds in common.in_rounds(systems, args.rounds, f"{np} ranks").items():
            for size in args.sizes:
                seconds = [by_size[size].seconds for by_size in rounds]
                result.append(
                    {"ranks": np, "system": name, "size_bytes": size, "seconds": seconds}
                )
    return result


def tables(results: dict[str, Any]) -> str:
    """Formats GB/s and processor time by system and size, memory, and more ranks."""
    result = []
    if results["gb_per_s"]:
        rates, processor = results["gb_per_s"], results["processor_s_per_gb"]
        result.append(ratio_table("GB/s of payload, 2 ranks", rates, RATIOS))
        result.append(ratio_table("processor seconds per GB and rank", processor, RATIOS[:2]))
    peaks, more_ranks = results["peak_memory_in_gradients"], results["more_ranks"]
    result += [memory_table(peaks)] if "without" in peaks else []
    result += [ranks_table(more_ranks)] if more_ranks else []
    return "\n\n".join(result)


def ratio_table(
    title: str, values: dict[str, dict[str, float]], ratios: Sequence[tuple[str, str]]
) -> str:
    """Formats values by system and size, and ratios of systems."""
    sizes = list(next(iter(values.values())))
    header = [title, *(bench.format_size(int(size)) for size in sizes)]
    rows = [
        [TITLES[name], *(f"{by_size[size]:.2f}" for size in sizes)]
        for name, by_size in values.items()
    ]
    for ours, peer in ratios:
        if ours in values and peer in values:
            cells = [common.ratio(values[ours][size], values[peer][size]) for size in sizes]
            rows.append([f"**{TITLES[ours]} / {TITLES[peer]}**", *cells])
    return common.table(header, rows)


def ranks_table(rows: list[dict[str, Any]]) -> str:
    """Formats times by number of ranks, system and size, and the ratio to Gloo's speed."""
    times: dict[tuple[int, str], dict[int, float]] = {}
    for row in rows:
        run = times.setdefault((row["ranks"], row["system"]), {})
        run[row["size_bytes"]] = common.median(row["seconds"])
    sizes = list(next(iter(times.values())))
    cells = []
    for (ranks, system), run in times.items():
        cells.append([system, str(ranks), *(f"{run[size] * 1e3:.2f}" for size in sizes)])
        peer = times.get((ranks, "gloo"))
        if peer is not None and system == "hostopt grpc+tcp":
            ratios = [common.ratio(peer[size], run[size]) for size in sizes]
            cells.append([f"**{TITLES['gloo']} / {system}**", str(ranks), *ratios])
    return common.table(["time, ms", "ranks", *map(bench.format_size, sizes)], cells)


def memory_table(peaks: dict[str, list[float]]) -> str:
    without = common.median(peaks["without"])
    rows = [
        [name, f"{common.median(values):.2f}", f"{common.median(values) - without:.2f}"]
        for name, values in peaks.items()
    ]
    return common.table(["memory of a rank, in gradient bytes", "peak", "extra"], rows)


def paint(results: dict[str, Any], axes: Any) -> None:
    for name, by_size in results["gb_per_s"].items():
        style = "o-" if name in OURS else "s--"
        sizes = [int(size) for size in by_size]
        axes.plot(sizes, list(by_size.values()), style, label=TITLES[name])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [bench.format_size(size) for size in sizes])
    axes.set_ylabel("payload, GB/s")
    axes.set_title("All-reduce of float32, 2 ranks on one machine")
    axes.grid(which="both", alpha=0.3)
    axes.legend(fontsize=8)


def main() -> None:
    parser = common.parser(__doc__, HERE)
    sizes = [bench.parse_size(text) for text in SIZES]
    parser.add_argument("--sizes", type=bench.parse_size, nargs="+", default=sizes)
    parser.add_argument("--systems", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--repetitions", type=int, default=7, help="in each round")
    parser.add_argument(
        "--np", type=int, nargs="*", default=[], help="uncompressed ones on more ranks"
    )
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory")
    args = parser.parse_args()
    systems = find_systems(args)
    costs = common.in_rounds(systems, args.rounds, "2 ranks")
    medians = {
        name: {
            size: Cost(*map(common.median, zip(*(by_size[size] for by_size in rounds))))
            for size in args.sizes
        }
        for name, rounds in costs.items()
    }
    peaks: dict[str, list[float]] = {}
    if not args.no_memory:
        ways: dict[str, Any] = {"without": None, **{n: OURS[n] for n in args.systems if n in OURS}}
        measures = {name: functools.partial(measure_memory, way) for name, way in ways.items()}
        peaks = common.in_rounds(measures, args.rounds, "memory")
    more_ranks = measure_more_ranks(args)
    peers = [common.peer_python(name) for name in ("gloo", "mpi") if name in args.systems]
    results = {
        "machine": common.machine(*peers),
        "rounds": args.rounds,
        "costs_by_round": costs,
        "gb_per_s": {
            name: {size: size / cost.seconds / 1e9 for size, cost in by_size.items()}
            for name, by_size in medians.items()
        },
        "processor_s_per_gb": {
            name: {size: cost.processor_s / size * 1e9 for size, cost in by_size.items()}
            for name, by_size in medians.items()
        },
        "peak_memory_in_gradients": peaks,
        "more_ranks": more_ranks,
    }
    common.publish(results, args, tables, paint)


if __name__ == "__main__":
    main()
