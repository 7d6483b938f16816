"""Expensive input, prepared by each rank and by data workers, in interleaved rounds."""

from __future__ import annotations

import functools
import operator
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common

HERE = Path(__file__).resolve().parent
WORK = {"none": "cheap", "cpu": "computes", "wait": "waits"}
_TIMEOUT_S = 600.0
Rounds = list[dict[str, float]]  # steps/s by number of data workers, of each round


def command_of(data_workers: int, work: str, cost: float, steps: int) -> list[object]:
    """Returns the command that trains two ranks.

    Args:
      data_workers: their number; 0 if each rank prepares its own data.
      work: one of WORK; "none" has a cost of 0.
      cost: products of matrices for each batch, or ms.
      steps: number of timed steps.
    """
    kind, cost = ("cpu", 0.0) if work == "none" else (work, cost)
    rank = [sys.executable, HERE / "rank.py", "--work", kind, "--cost", cost, "--steps", steps]
    return common.hostopt_run(2, *rank, options=["--verbose", "--data-workers", data_workers])


def measure(data_workers: int, work: str, cost: float, steps: int) -> float:
    """Runs two ranks once, and returns their mean number of steps per second."""
    output = common.run(command_of(data_workers, work, cost, steps), _TIMEOUT_S)
    return sum(result["steps_per_s"] for result in common.results_in(output, 2)) / 2


def name_of(data_workers: str) -> str:
    if data_workers == "0":
        return "each rank"
    return f"{data_workers} data worker{'s' * (data_workers != '1')}"


def tables(results: dict[str, Any]) -> str:
    """Formats medians, and the median of the ratio to "each rank" in each round."""
    result: dict[str, Rounds] = results["steps_per_s"]
    rows = []
    for count in results["data_workers"]:
        row = [name_of(count)]
        for rounds in result.values():
            share = common.in_each_round(rounds, operator.truediv, count, "0")
            shown = common.cell(common.middle(rounds, count), 1)
            row.append(shown if count == "0" or share is None else f"{shown} ({share:.2f})")
        rows.append(row)
    return common.table(["steps/s (ratio)", *(WORK[work] for work in result)], rows)


def paint(results: dict[str, Any], axes: Any) -> None:
    result: dict[str, Rounds] = results["steps_per_s"]
    shares = {
        name_of(count): [
            common.in_each_round(rounds, operator.truediv, count, "0")
            for rounds in result.values()
        ]
        for count in results["data_workers"]
        if count != "0"
    }
    common.bars(axes, [WORK[work] for work in result], shares)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("speed, each rank's own input = 1")
    axes.set_title("2 ranks on one machine")


def main() -> None:
    parser = common.parser(__doc__, HERE)
    parser.add_argument("--data-workers", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--products", type=float, default=250.0, help="of matrices, per batch")
    parser.add_argument("--wait-ms", type=float, default=20.0, help="per batch")
    parser.add_argument("--steps", type=int, default=300, help="timed steps")
    args = parser.parse_args()
    result: dict[str, Rounds] = {}
    for work in args.work:
        cost = args.wait_ms if work == "wait" else args.products
        measures = {
            str(count): functools.partial(measure, count, work, cost, args.steps)
            for count in args.data_workers
        }
        result[work] = common.each_round(measures, args.rounds, f"{WORK[work]}:")
    results = {
        "machine": common.machine(),
        "data_workers": [str(count) for count in args.data_workers],
        "steps_per_s": result,
    }
    common.publish(results, args, tables, paint)


if __name__ == "__main__":
    main()
