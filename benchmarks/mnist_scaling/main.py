"""Steps per second of two workers, with and without communication, in interleaved rounds."""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common

HERE = Path(__file__).resolve().parent
SYSTEMS = {
    "none": "no communication (two independent runs): the limit",
    "hostopt": "hostopt, automatic",
    "hostopt-whole": "hostopt, automatic, all updates by each rank",
    "hostopt-divided": "hostopt, automatic, divided updates",
    "api": "hostopt, DistributedOptimizer",
    "hostopt-tcp": "hostopt, data sockets only",
    "hostopt-tcp-divided": "hostopt, data sockets only, divided updates",
    "hostopt-grpc": "hostopt, gRPC only",
    "mwms": "MultiWorkerMirroredStrategy, RING",
    "horovod-gloo": "Horovod, Gloo",
    "horovod-mpi": "Horovod, OpenMPI",
}
OPTIONS = {  # communication, and if updates are divided; none: if that is faster
    "hostopt": ("auto", "none"),
    "hostopt-whole": ("auto", "false"),
    "hostopt-divided": ("auto", "true"),
    "hostopt-tcp": ("grpc+tcp", "false"),
    "hostopt-tcp-divided": ("grpc+tcp", "true"),
    "hostopt-grpc": ("grpc", "false"),
}
HOROVOD = ("horovod-gloo", "horovod-mpi")
STEPS = {64: 1000, 512: 400}  # timed steps by hidden units
_OTHER_STEPS, _TIMEOUT_S = 150, 400.0
Rates = dict[str, list[float]]  # steps/s of each round, by system


def measure(system: str, python: Path, hidden: int, steps: int) -> float:
    """Runs two workers once.

    Args:
      system: one of SYSTEMS.
      python: interpreter of the workers.
      hidden: units of the dense layer.
      steps: number of timed steps.

    Returns:
      Steps per second of a worker, the mean of both.

    Raises:
      BenchmarkError: a worker failed.
    """
    environ = dict(common.SAME_THREADS)
    with tempfile.TemporaryDirectory() as meeting:
        kind = system.partition("-")[0]
        worker = [python, HERE / "rank.py", "--system", kind, "--hidden", hidden]
        worker += ["--steps", steps, "--meeting", meeting]
        if system in HOROVOD:
            command, variables = common.horovod(system.partition("-")[2], python, *worker)
            environ.update(variables)
        else:
            if system in OPTIONS:
                communication, divides = OPTIONS[system]
                environ.update(
                    HOSTOPT_COMMUNICATION=communication,
                    HOSTOPT_COMPRESSION="none",
                    HOSTOPT_SHARD_OPTIMIZER=divides,
                )
            command = common.hostopt_run(2, *worker)
        results = common.results_in(common.run(command, _TIMEOUT_S, environ), 2)
    return sum(result["steps_per_s"] for result in results) / 2


def find_systems(expected: list[str]) -> dict[str, Path]:
    """Returns the installed systems, with the interpreter of their workers."""
    result: dict[str, Path] = {}
    for system in expected:
        python = common.peer_python("horovod") if system in HOROVOD else Path(sys.executable)
        if python is not None:
            result[system] = python
    return result


def tables(results: dict[str, Any]) -> str:
    """Formats medians, in brackets relative to no communication, and ratios."""
    result: dict[str, Rates] = results["steps_per_s"]
    medians = {u: {s: common.median(v) for s, v in rates.items()} for u, rates in result.items()}
    rows = []
    for system, title in SYSTEMS.items():
        if any(system in by_system for by_system in medians.values()):
            cells = [_cell(by_system, system) for by_system in medians.values()]
            rows.append([title, *cells])
    for ours, peers, title in (
        ("api", ("hostopt",), "DistributedOptimizer / strategy"),
        ("hostopt", HOROVOD, "automatic / fastest Horovod"),
        ("hostopt-tcp", ("mwms",), "data sockets only / RING"),
        ("hostopt-tcp", HOROVOD, "data sockets only / fastest Horovod"),
    ):
        cells = []
        for by_system in medians.values():
            fastest = max((by_system[p] for p in peers if p in by_system), default=None)
            cells.append(common.ratio(by_system.get(ours), fastest))
        if set(cells) != {"-"}:
            rows.append([f"**{title}**", *cells])
    return common.table(["steps/s of each worker", *(f"U = {u}" for u in result)], rows)


def _cell(by_system: dict[str, float], system: str) -> str:
    if system not in by_system:
        return "-"
    share = common.ratio(by_system[system], by_system.get("none"))
    return f"{by_system[system]:.1f} ({share})"


def _share(rates: Rates, system: str) -> float | None:
    if system not in rates or "none" not in rates:
        return None
    return common.median(rates[system]) / common.median(rates["none"])


def paint(results: dict[str, Any], axes: Any) -> None:
    result: dict[str, Rates] = results["steps_per_s"]
    shares = {
        title: [_share(rates, system) for rates in result.values()]
        for system, title in SYSTEMS.items()
        if system != "none" and any(system in rates for rates in result.values())
    }
    common.bars(axes, [f"U = {u}" for u in result], shares)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("share of the speed without communication")
    axes.set_title("MNIST network, 2 workers on one machine")


def main() -> None:
    parser = common.parser(__doc__, HERE)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 512], help="U")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--steps", type=int, help="timed steps (default: as U is)")
    args = parser.parse_args()
    systems = find_systems(args.systems)
    attributes = common.machine(*(systems[name] for name in HOROVOD if name in systems))
    result: dict[int, Rates] = {}
    for hidden in args.hidden:
        steps = args.steps or STEPS.get(hidden, _OTHER_STEPS)
        measures: dict[str, Callable[[], float]] = {
            system: functools.partial(measure, system, python, hidden, steps)
            for system, python in systems.items()
        }
        result[hidden] = common.in_rounds(measures, args.rounds, f"U = {hidden}")
    results = {"machine": attributes, "threads": common.SAME_THREADS, "steps_per_s": result}
    common.publish(results, args, tables, paint)


if __name__ == "__main__":
    main()
