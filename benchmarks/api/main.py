"""Horovod's API: eager calls and `fit` by Horovod and by hostopt, in interleaved rounds."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common

HERE = Path(__file__).resolve().parent
SYSTEMS = {
    "hostopt": "hostopt, automatic",
    "hostopt-tcp": "hostopt, data sockets only",
    "horovod-gloo": "Horovod, Gloo",
    "horovod-mpi": "Horovod, OpenMPI",
}
_COMMUNICATION = {"hostopt": "auto", "hostopt-tcp": "grpc+tcp"}
_TIMEOUT_S = 400.0
FIT = "fit"


def measure(system: str, python: Path, args: Any) -> dict[str, float]:
    """Runs two ranks once.

    Args:
      system: one of SYSTEMS.
      python: interpreter of the ranks.
      args: sizes.

    Returns:
      Milliseconds by kind of call, and steps/s of `FIT`, the means of both ranks.
    """
    environ = dict(common.SAME_THREADS)
    kind = system.partition("-")[0]
    rank = [python, HERE / "rank.py", "--system", kind, "--hidden", args.hidden]
    rank += ["--steps", args.steps, "--repetitions", args.repetitions]
    if system in _COMMUNICATION:
        # the Keras of the TensorFlow that Horovod is built for
        environ.update(HOSTOPT_COMMUNICATION=_COMMUNICATION[system], TF_USE_LEGACY_KERAS="0")
        command = common.hostopt_run(2, *rank)
    else:
        command, variables = common.horovod(system.partition("-")[2], python, *rank)
        environ.update(variables)
    results = common.results_in(common.run(command, _TIMEOUT_S, environ), 2)
    flat = [{**each["calls_ms"], FIT: each["fit"]} for each in results]
    return {name: sum(each[name] for each in flat) / len(flat) for name in flat[0]}


def tables(results: dict[str, Any]) -> str:
    """Formats medians, and the ratios of Horovod's and hostopt's."""
    rounds: dict[str, list[dict[str, float]]] = results["rounds"]
    names = [name for name in next(iter(rounds.values()))[0] if name != FIT]
    rows = [
        [
            SYSTEMS[system],
            *(common.cell(common.middle(each, name), 2) for name in names),
            common.cell(common.middle(each, FIT), 1),
        ]
        for system, each in rounds.items()
    ]
    for ours in _COMMUNICATION:
        for peer in ("horovod-gloo", "horovod-mpi"):
            if ours in rounds and peer in rounds:
                rows.append(_speeds(rounds, ours, peer, names))
    return common.table(["", *(f"{name}, ms" for name in names), "fit, steps/s"], rows)


def _speeds(
    rounds: dict[str, list[dict[str, float]]], ours: str, peer: str, names: list[str]
) -> list[str]:
    times = [
        common.ratio(common.middle(rounds[peer], name) or 0.0, common.middle(rounds[ours], name))
        for name in names
    ]
    fit = common.ratio(common.middle(rounds[ours], FIT) or 0.0, common.middle(rounds[peer], FIT))
    title = f"**speed of {SYSTEMS[ours]} / {SYSTEMS[peer]}**"
    return [title, *times, fit]


def paint(results: dict[str, Any], axes: Any) -> None:
    rounds: dict[str, list[dict[str, float]]] = results["rounds"]
    names = [name for name in next(iter(rounds.values()))[0] if name != FIT]
    series = {
        SYSTEMS[system]: [common.middle(each, name) for name in names]
        for system, each in rounds.items()
    }
    common.bars(axes, names, series)
    axes.set_yscale("log")
    axes.set_ylabel("ms of an eager call")
    axes.set_title("Eager all-reduce, 2 ranks on one machine")


def main() -> None:
    parser = common.parser(__doc__, HERE)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--hidden", type=int, default=64, help="units of the dense layer")
    parser.add_argument("--steps", type=int, default=200, help="steps of an epoch")
    parser.add_argument("--repetitions", type=int, default=300, help="of eager calls")
    args = parser.parse_args()
    horovod = common.peer_python("horovod")
    pythons = {s: Path(sys.executable) if s in _COMMUNICATION else horovod for s in args.systems}
    measures = {
        system: functools.partial(measure, system, python, args)
        for system, python in pythons.items()
        if python is not None
    }
    attributes = common.machine(*([horovod] if horovod is not None else []))
    rounds = common.in_rounds(measures, args.rounds, "API")
    results = {"machine": attributes, "threads": common.SAME_THREADS, "rounds": rounds}
    common.publish(results, args, tables, paint)


if __name__ == "__main__":
    main()
