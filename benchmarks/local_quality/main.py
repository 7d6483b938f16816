"""Accuracy after equal steps: a reduction in every step against synchronisations of variables."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common, local_ways

HERE = Path(__file__).resolve().parent
TASKS = {"digits": "handwritten digits", "bytes": "next byte of Python's library"}
WORKERS = 4
WAYS = ["every step", "average", "diloco", "int4", "background bf16"]
BASE = "every step"
# of a task, which may be overridden, with the number of their values
SETTINGS = {"outer": 2, "steps": 1, "every": 1, "learning_rate": 1}
_TIMEOUT_S = 3600.0
Runs = list[dict[str, dict[str, float]]]  # results of a way, for each seed


def measure(task: str, seed: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Trains in all ways with one seed.

    Args:
      task: one of TASKS.
      seed: of initial values and the order of examples.
      args: arguments of the benchmark.

    Returns:
      Accuracy, loss and seconds of each way.

    Raises:
      BenchmarkError: a rank failed.
    """
    command = [sys.executable, HERE / "rank.py", "--task", task, "--seed", seed]
    command += ["--ways", *args.ways]
    for name in SETTINGS:
        if getattr(args, name) is not None:
            command += [f"--{name.replace('_', '-')}", *getattr(args, name)]
    text = common.run(common.hostopt_run(WORKERS, *command), _TIMEOUT_S)
    results = common.results_in(text, len(args.ways))
    common.log(f"{task}, seed {seed}: {results}")
    return {result.pop("way"): result for result in results}


def tables(results: dict[str, Any]) -> str:
    """Formats the medians of the seeds, and the difference from a reduction in every step."""
    parts = []
    for task, runs in results["runs"].items():
        header = [TASKS[task], "test accuracy, %", "difference, points", "of the seeds", "loss"]
        rows = [_row(way.title, name, runs) for name, way in local_ways.WAYS.items()]
        parts.append(common.table(header, [row for row in rows if row]))
    return "\n\n".join(parts)


def _row(title: str, name: str, runs: Runs) -> list[str]:
    points = _points(runs, name)
    if not points:
        return []
    median, base = common.median(points), _points(runs, BASE)
    loss = common.median([run[name]["loss"] for run in runs if name in run])
    difference = f"{median - common.median(base):+.2f}" if base and name != BASE else "-"
    spread = f"{min(points):.2f} to {max(points):.2f}"
    return [title, f"{median:.2f}", difference, spread, f"{loss:.4f}"]


def _points(runs: Runs, name: str) -> list[float]:
    return [100 * run[name]["accuracy"] for run in runs if name in run]


def paint(results: dict[str, Any], axes: Any) -> None:
    tasks = results["runs"]
    names = [n for n in local_ways.WAYS if any(_points(runs, n) for runs in tasks.values())]
    for number, (task, runs) in enumerate(tasks.items()):
        base = common.median(_points(runs, BASE))
        for place, name in enumerate(names):
            height = place + 0.3 * (number - 0.5)
            points = [value - base for value in _points(runs, name)]
            label = TASKS[task] if not place else None
            axes.plot(points, [height] * len(points), "o", color=f"C{number}", label=label)
            axes.plot([common.median(points)], [height], "k|", markersize=14)
    axes.axvspan(-0.2, 0.2, color="0.9", zorder=0)
    axes.set_yticks(range(len(names)), [local_ways.WAYS[name].title for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("test accuracy, points above the median of a reduction in every step")
    axes.set_title(f"{WORKERS} workers, equal steps; a dot for each seed, a bar for the median")
    axes.legend(fontsize=8)


def main() -> None:
    parser = common.parser(__doc__, HERE)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--ways", nargs="+", choices=local_ways.WAYS, default=WAYS)
    for name, count in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", nargs=count, help="as the task is")
    parser.add_argument("--first-seed", type=int, default=1)
    args = parser.parse_args()
    runs: dict[str, Runs] = {}
    for task in args.tasks:
        seeds = range(args.first_seed, args.first_seed + args.rounds)
        measures = {str(s): functools.partial(measure, task, s, args) for s in seeds}
        runs[task] = list(common.each_round(measures, 1, task)[0].values())
    results = {"machine": common.machine(), "workers": WORKERS, "runs": runs}
    common.publish(results, args, tables, paint)


if __name__ == "__main__":
    main()
