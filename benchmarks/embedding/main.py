"""Steps per second of recommender models and of moving averages, in interleaved rounds."""

from __future__ import annotations

import argparse
import functools
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common, workers

HERE = Path(__file__).resolve().parent
MODELS = {
    "deepfm": "DeepFM",
    "wide-deep": "wide & deep",
    "dense": "100 variables",
    "ema": "100 variables, averaged",
}
SYSTEMS = {
    "one": "one process",
    "none": "two independent runs",
    "host": "hostopt, one host",
    "grpc": "hostopt, gRPC only",
    "horovod-gloo": "Horovod, Gloo",
    "horovod-mpi": "Horovod, OpenMPI",
    "horovod-gloo-dense": "Horovod, Gloo, dense",
    "horovod-mpi-dense": "Horovod, OpenMPI, dense",
}
HOROVOD = tuple(system for system in SYSTEMS if system.startswith("horovod"))
STEPS = {"deepfm": 500, "wide-deep": 500, "dense": 300, "ema": 300}  # timed steps
_TIMEOUT_S = 600.0
Rounds = list[dict[str, float]]  # steps/s by system, of each round


def measure(system: str, model: str, python: Path, args: argparse.Namespace) -> float:
    """Runs one system once.

    Args:
      system: one of SYSTEMS.
      model: one of MODELS.
      python: interpreter of the processes.
      args: arguments of the benchmark, with optimizer, batch and steps.

    Returns:
      Steps per second of a process, the mean of the processes.

    Raises:
      BenchmarkError: a process failed.
    """
    trains = {"one": "stock", "none": "stock"}.get(system, "hostopt")
    how = "two" if system == "none" else system.replace("-dense", "")
    program: list[object] = [HERE / "rank.py", "--model", model, "--batch", args.batch]
    program += ["--optimizer", args.optimizer, "--steps", args.steps or STEPS[model]]
    program += ["--system", "horovod" if system in HOROVOD else trains]
    if system.endswith("-dense"):
        program.append("--sparse-as-dense")
    results = workers.run(how, program, _TIMEOUT_S, python)
    return sum(result["steps_per_s"] for result in results) / len(results)


def find_measures(args: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """Returns the measuring functions of all systems and models, by `key_of`."""
    result = {}
    for model in args.models:
        for system in args.systems:
            if system in HOROVOD and model != "deepfm":
                continue
            python = common.peer_python("horovod") if system in HOROVOD else Path(sys.executable)
            if python is not None:
                result[key_of(model, system)] = functools.partial(
                    measure, system, model, python, args
                )
    return result


def key_of(model: str, system: str) -> str:
    """Returns the name of a measurement in the results."""
    return f"{model} {system}"


def fastest_horovod(rounds: Rounds, model: str) -> str | None:
    """Returns the key of the Horovod with the best median; None if there is none."""
    keys = [key_of(model, system) for system in HOROVOD]
    medians = {key: common.middle(rounds, key) for key in keys}
    measured = {key: value for key, value in medians.items() if value is not None}
    return max(measured, key=lambda key: measured[key], default=None)


def ratio(rounds: Rounds, first: str, second: str | None) -> str:
    """Formats the median of the ratio of each round as a table cell."""
    if second is None:
        return "-"
    return common.cell(common.in_each_round(rounds, operator.truediv, first, second), 2)


def tables(results: dict[str, Any]) -> str:
    """Formats medians and ratios."""
    rounds: Rounds = results["steps_per_s"]
    measured = {key for done in rounds for key in done}
    models = [m for m in MODELS if any(key_of(m, system) in measured for system in SYSTEMS)]
    rows = [
        [title, *(common.cell(common.middle(rounds, key_of(m, system)), 1) for m in models)]
        for system, title in SYSTEMS.items()
    ]
    for first, second in (("host", "one"), ("grpc", "one"), ("none", "one"), ("host", "none")):
        cells = [ratio(rounds, key_of(m, first), key_of(m, second)) for m in models]
        rows.append([f"**{SYSTEMS[first]} / {SYSTEMS[second]}**", *cells])
    for system in ("one", "host", "grpc"):
        cells = ["-"] * len(models)
        if "ema" in models:
            averaged, plain = key_of("ema", system), key_of("dense", system)
            cells[models.index("ema")] = ratio(rounds, averaged, plain)
        rows.append([f"**{SYSTEMS[system]}: averaged / not averaged**", *cells])
    for system in ("grpc", "host"):
        cells = [ratio(rounds, key_of(m, system), fastest_horovod(rounds, m)) for m in models]
        rows.append([f"**{SYSTEMS[system]} / fastest Horovod**", *cells])
    rows = [row for row in rows if set(row[1:]) != {"-"}]
    return common.table(["steps/s of each process", *(MODELS[m] for m in models)], rows)


def paint(results: dict[str, Any], axes: Any) -> None:
    rounds: Rounds = results["steps_per_s"]
    shares = {}
    for system, title in SYSTEMS.items():
        pairs = [(key_of(model, system), key_of(model, "one")) for model in MODELS]
        result = [common.in_each_round(rounds, operator.truediv, *pair) for pair in pairs]
        if system != "one" and any(share is not None for share in result):
            shares[title] = result
    common.bars(axes, list(MODELS.values()), shares)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("share of the speed of one process alone")
    axes.set_title("2 workers on one machine")


def main() -> None:
    parser = common.parser(__doc__, HERE)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--batch", type=int, default=256, help="examples of each process")
    parser.add_argument(
        "--optimizer", choices=["adagrad", "adam"], default="adagrad", help="of DeepFM"
    )
    parser.add_argument("--steps", type=int, help="timed steps (default: as the model is)")
    args = parser.parse_args()
    measures = find_measures(args)
    peers = [common.peer_python("horovod")] if set(HOROVOD) & set(args.systems) else []
    results = {
        "machine": common.machine(*peers),
        "threads": common.SAME_THREADS,
        "batch": args.batch,
        "optimizer": args.optimizer,
        "steps_per_s": common.each_round(measures, args.rounds),
    }
    common.publish(results, args, tables, paint)


if __name__ == "__main__":
    main()
