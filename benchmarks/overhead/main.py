"""Fixed cost of a step of tiny models above the stock Estimator, in interleaved rounds."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common, workers

HERE = Path(__file__).resolve().parent
SYSTEMS = {
    "stock": "stock, one process",
    "stock-2": "stock, two processes",
    "one-rank": "hostopt, one rank",
    "host": "hostopt, one host",
    "grpc": "hostopt, gRPC only",
}
HOW = {"stock": "one", "stock-2": "two", "one-rank": "one", "host": "host", "grpc": "grpc"}
ABOVE = [
    ("one-rank", "stock"),
    ("host", "stock"),
    ("host", "stock-2"),
    ("grpc", "stock"),
    ("grpc", "stock-2"),
]
KINDS = ("dense", "sparse")
_TIMEOUT_S = 900.0
Rounds = list[dict[str, float]]  # ms a step by system, of each round


def measure(system: str, kind: str, variables: int, steps: int) -> float:
    """Runs one system once.

    Args:
      system: one of SYSTEMS.
      kind: one of KINDS.
      variables: number of variables of the model.
      steps: number of timed steps.

    Returns:
      Milliseconds per step: the median of the steps of a process, the mean of the processes.

    Raises:
      BenchmarkError: a process failed.
    """
    trains = "stock" if system.startswith("stock") else "hostopt"
    program: list[object] = [HERE / "rank.py", "--system", trains, "--kind", kind]
    program += ["--variables", variables, "--steps", steps]
    results = workers.run(HOW[system], program, _TIMEOUT_S)
    return sum(result["step_ms"] for result in results) / len(results)


def above(rounds: Rounds, system: str, base: str) -> float | None:
    """Returns the median of the difference of each round in ms; None if there is none."""
    return common.in_each_round(rounds, operator.sub, system, base)


def tables(results: dict[str, Any]) -> str:
    """Formats the times of a step, and their difference from the stock Estimator."""
    result: dict[str, Rounds] = results["step_ms"]
    rows = [
        [title, *(common.cell(common.middle(rounds, system), 2) for rounds in result.values())]
        for system, title in SYSTEMS.items()
    ]
    rows += [
        [
            f"**{SYSTEMS[system]}, above {SYSTEMS[base]}**",
            *(common.cell(above(rounds, system, base), 2) for rounds in result.values()),
        ]
        for system, base in ABOVE
    ]
    measured = [row for row in rows if set(row[1:]) != {"-"}]
    return common.table(["ms a step", *result], measured)


def paint(results: dict[str, Any], axes: Any) -> None:
    result: dict[str, Rounds] = results["step_ms"]
    expected = (("one-rank", "stock"), ("host", "stock"), ("grpc", "stock"))
    series: dict[str, Sequence[float | None]] = {
        SYSTEMS[system]: [above(rounds, system, base) for rounds in result.values()]
        for system, base in expected
    }
    common.bars(axes, list(result), series)
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_ylim(top=10 * axes.get_ylim()[1])  # room for the legend
    axes.set_ylabel("ms a step above one process of the stock Estimator")
    axes.set_title("Tiny models on one machine")


def main() -> None:
    parser = common.parser(__doc__, HERE)
    parser.add_argument("--variables", type=int, nargs="+", default=[2, 24, 200])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--steps", type=int, default=500, help="timed steps")
    args = parser.parse_args()
    result: dict[str, Rounds] = {}
    for kind in args.kinds:
        for variables in args.variables:
            measures = {
                system: functools.partial(measure, system, kind, variables, args.steps)
                for system in args.systems
            }
            model = f"{kind} {variables}"
            result[model] = common.each_round(measures, args.rounds, f"{model}:")
    attributes = common.machine()
    results = {"machine": attributes, "threads": common.SAME_THREADS, "step_ms": result}
    common.publish(results, args, tables, paint)


if __name__ == "__main__":
    main()
