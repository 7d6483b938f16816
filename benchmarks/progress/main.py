"""Cost of watching a run: MNIST watched in several ways and not at all, in interleaved rounds."""

from __future__ import annotations

import functools
import operator
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common

HERE = Path(__file__).resolve().parent
RANK = HERE.parent / "mnist_scaling" / "rank.py"
SYSTEMS = {
    "nothing": "not watched",
    "shown": "line of progress, and metrics read once a second",
    "status": "`hostopt status` once a second",
    "asked": "the same question by a process that keeps running",
}
_HOW = {"shown": "terminal", "status": "status", "asked": "ask"}
_TIMEOUT_S = 400.0
Rounds = list[dict[str, float]]  # steps/s by system, of each round


def command_of(system: str, hidden: int, steps: int, meeting: str) -> list[object]:
    """Returns the command that trains two ranks and watches them.

    Args:
      system: one of SYSTEMS.
      hidden: units of the dense layer.
      steps: number of timed steps.
      meeting: an empty directory, in which the ranks also make their model_dir.
    """
    rank: list[object] = [sys.executable, RANK, "--system", "hostopt", "--hidden", hidden]
    rank += ["--steps", steps, "--meeting", meeting]
    if system == "shown":
        run = common.hostopt_run(2, *rank, options=["--metrics-port", 0])
    else:  # without the file, the chief neither measures nor writes its progress
        unwatched = ["env", "-u", "HOSTOPT_PROGRESS_FILE", *rank]
        run = common.hostopt_run(2, *unwatched, options=["--verbose"])
    if system == "nothing":
        return run
    watch: list[object] = [sys.executable, HERE / "watch.py", "--how", _HOW[system]]
    return [*watch, "--parent", meeting, "--", *run]


def measure(system: str, hidden: int, steps: int) -> float:
    """Runs two ranks once.

    Args:
      system: one of SYSTEMS.
      hidden: units of the dense layer.
      steps: number of timed steps.

    Returns:
      Steps per second of a rank, the mean of both.

    Raises:
      BenchmarkError: a rank failed, or the training has not been seen.
    """
    with tempfile.TemporaryDirectory() as meeting:
        environ = {**common.SAME_THREADS, "TERM": "xterm", "TMPDIR": meeting}
        command = command_of(system, hidden, steps, meeting)
        results = common.results_in(common.run(command, _TIMEOUT_S, environ), 2)
    return sum(result["steps_per_s"] for result in results) / 2


def cost(rounds: Rounds, system: str) -> float | None:
    """Returns the median of the part of the speed that is lost in each round; None if unknown."""
    share = common.in_each_round(rounds, operator.truediv, system, "nothing")
    return None if share is None else 1.0 - share


def tables(results: dict[str, Any]) -> str:
    """Formats medians, and the costs of watching: medians of the ratio of each round."""
    result: dict[str, Rounds] = results["steps_per_s"]
    rows = []
    for system, title in SYSTEMS.items():
        cells = [common.cell(common.middle(rounds, system), 1) for rounds in result.values()]
        for number, rounds in enumerate(result.values()):
            lost = cost(rounds, system)
            if system != "nothing" and lost is not None:
                cells[number] += f" ({100 * lost:.1f} %)"
        if set(cells) != {"-"}:
            rows.append([title, *cells])
    return common.table(["steps/s (cost)", *(f"U = {u}" for u in result)], rows)


def paint(results: dict[str, Any], axes: Any) -> None:
    result: dict[str, Rounds] = results["steps_per_s"]
    shares = {
        SYSTEMS[system]: [
            common.in_each_round(rounds, operator.truediv, system, "nothing")
            for rounds in result.values()
        ]
        for system in _HOW
    }
    common.bars(axes, [f"U = {u}" for u in result], shares)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("share of the speed of a run that is not watched")
    axes.set_title("MNIST network, 2 workers on one machine")


def main() -> None:
    parser = common.parser(__doc__, HERE)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 512], help="U")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--steps", type=int, default=2000, help="timed steps")
    args = parser.parse_args()
    result: dict[str, Rounds] = {}
    for hidden in args.hidden:
        measures = {s: functools.partial(measure, s, hidden, args.steps) for s in args.systems}
        result[str(hidden)] = common.each_round(measures, args.rounds, f"U = {hidden}:")
    results = {"machine": common.machine(), "threads": common.SAME_THREADS, "steps_per_s": result}
    common.publish(results, args, tables, paint)


if __name__ == "__main__":
    main()
