"""All-reduces and MNIST on 1 to 8 hosts behind a switch, with limited lines, against the model."""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common, network
from benchmarks.model import main as model
from hostopt.measure import bench

HERE = Path(__file__).resolve().parent
SIZES = ("256KiB", "1MiB", "16MiB")  # smaller ones do not use the ring, which is modelled
RANK = HERE.parent / "mnist_scaling" / "rank.py"
HIDDEN = 64
# conv 32 of 3 x 3, 13 x 13 x 32 values to the dense layer, 10 classes: each with biases
GRADIENT_BYTES = 4 * (10 * 32 + (13 * 13 * 32 + 1) * HIDDEN + (HIDDEN + 1) * 10)
_TIMEOUT_S = 300.0


def measure(namespaces: dict[str, str], sizes: list[int], repetitions: int) -> dict[int, float]:
    """Times all-reduces of ranks in these namespaces once; returns seconds by size."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "times.json")
        command = [sys.executable, "-m", "hostopt", "bench", "--quiet", "--json", path]
        command += ["--repetitions", repetitions, "--sizes", *sizes]
        environ = {**common.SAME_THREADS, "HOSTOPT_COMMUNICATION": "grpc+tcp"}
        network.run(namespaces, command, _TIMEOUT_S, environ)
        return {timing.size_bytes: timing.median_s for timing in bench.load(path)}


def measure_step(namespaces: dict[str, str], system: str, steps: int) -> float:
    """Times steps of MNIST of ranks in these namespaces once.

    Args:
      namespaces: namespaces by address.
      system: "hostopt", or "none" for workers that do not communicate.
      steps: number of timed steps.

    Returns:
      Seconds of a step, the mean of all ranks.
    """
    with tempfile.TemporaryDirectory() as meeting:
        command = [sys.executable, RANK, "--system", system, "--hidden", HIDDEN]
        command += ["--steps", steps, "--meeting", meeting, "--workers", len(namespaces)]
        environ = {**common.SAME_THREADS, "HOSTOPT_COMMUNICATION": "grpc+tcp"}
        results = common.results_in(
            network.run(namespaces, command, _TIMEOUT_S, environ), len(namespaces)
        )
    return sum(1 / result["steps_per_s"] for result in results) / len(results)


def first(namespaces: dict[str, str], size: int) -> dict[str, str]:
    """Returns the first `size` namespaces."""
    return dict(itertools.islice(namespaces.items(), size))


def measure_steps(
    args: argparse.Namespace, namespaces: dict[str, str], costs: model.Costs
) -> list[dict[str, Any]]:
    """Measures steps of all numbers of ranks, with and without communication."""
    measures = {
        f"{system} {size}": functools.partial(
            measure_step, first(namespaces, size), system, args.steps
        )
        for size in (1, *args.ranks)
        for system in ("none", "hostopt")
    }
    seconds = common.in_rounds(measures, args.rounds, "MNIST")
    return [
        {
            "ranks": size,
            "alone_s": seconds[f"none {size}"],
            "seconds_by_round": seconds[f"hostopt {size}"],
            "modelled_s": common.median(seconds[f"none {size}"])
            + model.ring_s(costs, size, GRADIENT_BYTES, args.gbit, "float32"),
        }
        for size in (1, *args.ranks)
    ]


def measure_all_reduces(
    args: argparse.Namespace, namespaces: dict[str, str], costs: model.Costs
) -> list[dict[str, Any]]:
    """Measures all numbers of ranks; returns a row for each of them and each size."""
    measures = {
        str(size): functools.partial(
            measure, first(namespaces, size), args.sizes, args.repetitions
        )
        for size in args.ranks
    }
    actual = common.in_rounds(measures, args.rounds, "all-reduces")
    return [
        {
            "ranks": int(ranks),
            "size_bytes": nbytes,
            "seconds_by_round": [seconds[nbytes] for seconds in rounds],
            "modelled_s": model.ring_s(costs, int(ranks), nbytes, args.gbit, "float32"),
        }
        for ranks, rounds in actual.items()
        for nbytes in args.sizes
    ]


def tables(results: dict[str, Any]) -> str:
    """Formats measured and modelled times of all-reduces, and of steps of MNIST."""
    compared = ["measured, ms", "modelled, ms", "measured / modelled"]
    all_reduces = [
        [str(row["ranks"]), bench.format_size(row["size_bytes"]), *compare(row)]
        for row in results["rows"]
    ]
    steps = [
        [str(row["ranks"]), f"{1e3 * common.median(row['alone_s']):.2f}", *compare(row)]
        for row in results["steps"]
    ]
    return "\n\n".join(
        [
            common.table(["ranks", "size", *compared], all_reduces),
            common.table(["ranks", "MNIST step alone, ms", *compared], steps),
        ]
    )


def compare(row: dict[str, Any]) -> list[str]:
    """Formats the measured and the modelled time of a row, and their ratio."""
    measured_s, modelled_s = common.median(row["seconds_by_round"]), row["modelled_s"]
    times = [f"{1e3 * seconds:.2f}" for seconds in (measured_s, modelled_s)]
    return [*times, common.ratio(measured_s, modelled_s)]


def paint(results: dict[str, Any], axes: Any) -> None:
    for nbytes in sorted({row["size_bytes"] for row in results["rows"]}):
        rows = [row for row in results["rows"] if row["size_bytes"] == nbytes]
        ranks = [row["ranks"] for row in rows]
        measured_ms = [1e3 * common.median(row["seconds_by_round"]) for row in rows]
        (line,) = axes.plot(ranks, measured_ms, "o-", label=bench.format_size(nbytes))
        modelled_ms = [1e3 * row["modelled_s"] for row in rows]
        axes.plot(ranks, modelled_ms, "--", color=line.get_color(), label="the same, modelled")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("ranks")
    axes.set_ylabel("ms of an all-reduce")
    axes.set_title(f"Lines of {results['line_gbit_per_s']:g} Gbit/s, all ranks on one machine")
    axes.legend(fontsize=8)


def main() -> None:
    parser = common.parser(__doc__, HERE)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--gbit", type=float, default=1.0, help="rate of each line, Gbit/s")
    parser.add_argument(
        "--sizes", type=bench.parse_size, nargs="+", default=[bench.parse_size(s) for s in SIZES]
    )
    parser.add_argument("--repetitions", type=int, default=3, help="in each round")
    parser.add_argument("--steps", type=int, default=100, help="timed steps of MNIST")
    args = parser.parse_args()
    try:
        costs = model.read_costs(*model.read_inputs(**model.INPUTS))
        with network.bridged(max(args.ranks)) as namespaces:
            for name in namespaces.values():
                network.limit_rate(name, args.gbit * 1e9)
            rows = measure_all_reduces(args, namespaces, costs)
            steps = measure_steps(args, namespaces, costs)
    except common.BenchmarkError as error:
        sys.exit(f"scaling: {error}")
    results = {
        "machine": common.machine(),
        "line_gbit_per_s": args.gbit,
        "rows": rows,
        "steps": steps,
    }
    common.publish(results, args, tables, paint)


if __name__ == "__main__":
    main()
