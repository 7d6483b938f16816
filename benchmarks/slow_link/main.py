"""Speed of training over a slow link: a reduction in every step against local steps."""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common, local_ways, network

HERE = Path(__file__).resolve().parent
ALONE, OFFLOAD, BASE = "none", "offload", "every step"
TITLES = {ALONE: "no communication: the limit", OFFLOAD: "no communication, with host offload"}
TITLES.update({name: way.title for name, way in local_ways.WAYS.items()})
SPEED = ["average", "diloco", "background bf16", "background int8"]
BYTES = ["background bf16", "background int8", "background int4"]
# Share of an interval before the timed steps. The first interval begins after the first step, so
# these steps contain whole synchronisations, also in the background.
_WARM_UP = 0.35
_BASE_STEPS = {1000: 30, 100: 6}  # timed steps that reduce gradients, by Mbit/s
_TIMEOUT_S = 900.0
Rounds = list[dict[str, dict[str, float]]]  # results of a way, for each round


def measure(
    link: network.Link, steps: dict[str, int], mbit: float, every: int, hidden: int
) -> dict[str, dict[str, float]]:
    """Trains in some ways, with one rank on each side.

    Args:
      link: the link.
      steps: number of timed steps of each way.
      mbit: rate of the link, in Mbit/s; 0 for no limit.
      every: steps between two synchronisations.
      hidden: units of the model's dense layer.

    Returns:
      Steps per second, and bytes that a rank sends in a step, of each way.

    Raises:
      BenchmarkError: a rank failed.
    """
    command = [sys.executable, HERE / "rank.py", "--ways", *steps, "--steps", *steps.values()]
    command += [
        "--warm-up",
        int(_WARM_UP * every),
        "--every",
        every,
        "--hidden",
        hidden,
        "--mbit",
        mbit,
    ]
    environ = {**common.SAME_THREADS, "HOSTOPT_COMMUNICATION": "grpc+tcp"}
    with tempfile.TemporaryDirectory() as meeting:
        text = link.run([*command, "--meeting", meeting], _TIMEOUT_S, environ)
    results = common.results_in(text, 2 * len(steps))
    found: dict[str, dict[str, float]] = {}
    for name in steps:
        ranks = [result for result in results if result["way"] == name]
        names = ("steps_per_s", "sent_bytes")
        found[name] = {n: sum(rank[n] for rank in ranks) / len(ranks) for n in names}
    common.log(f"{mbit:g} Mbit/s: {found}")
    return found


def measure_all(link: network.Link, args: argparse.Namespace) -> dict[str, Any]:
    """Measures speeds in rounds, and then bytes of a longer interval.

    Args:
      link: the link.
      args: arguments of the benchmark.

    Returns:
      Results of all rounds by rate, and bytes of a step by way.
    """
    measures = {}
    for mbit in args.mbit:
        steps = dict.fromkeys([ALONE, OFFLOAD, BASE, *args.ways], args.every)
        steps[BASE] = _BASE_STEPS.get(int(mbit), 20)
        call = functools.partial(measure, link, steps, mbit, args.every, args.hidden)
        measures[f"{mbit:g}"] = call
    speeds = common.in_rounds(measures, args.rounds, "Mbit/s")
    steps = {BASE: 10, **dict.fromkeys(BYTES, args.long)}
    sent = measure(link, steps, 0, args.long, args.hidden) if args.long else {}
    return {"speeds": speeds, "sent_bytes": {n: each["sent_bytes"] for n, each in sent.items()}}


def tables(results: dict[str, Any]) -> str:
    """Formats speeds relative to no communication, and bytes."""
    speeds: dict[str, Rounds] = results["speeds"]
    rates = [f"{float(mbit) / 1000:g} Gbit/s" for mbit in speeds]
    header = ["steps/s of each worker", *rates, "bytes sent in a step"]
    every = f"N = {results['every']}"
    rows = [[_title(n, every), *_speeds(speeds, n), _sent(speeds, n)] for n in _measured(speeds)]
    parts = [common.table(header, rows)]
    sent = results["sent_bytes"]
    if sent:
        rows = [
            [_title(n, f"N = {results['long']}"), f"{each:,.0f}", f"{sent[BASE] / each:.1f}"]
            for n, each in sent.items()
        ]
        parts.append(common.table(["", "bytes sent in a step", "times fewer"], rows))
    return "\n\n".join(parts)


def _measured(speeds: dict[str, Rounds]) -> list[str]:
    return [n for n in TITLES if any(n in done for rounds in speeds.values() for done in rounds)]


def _title(name: str, every: str) -> str:
    return TITLES[name] if name in (ALONE, OFFLOAD, BASE) else f"{TITLES[name]}, {every}"


def _speeds(speeds: dict[str, Rounds], name: str) -> list[str]:
    cells = []
    for rounds in speeds.values():
        rate = common.median([done[name]["steps_per_s"] for done in rounds])
        cells.append(f"{rate:.2f} ({_share(rounds, name):.3f})")
    return cells


def _share(rounds: Rounds, name: str) -> float:
    """Returns the median over the rounds of the speed relative to no communication."""
    ratios = [done[name]["steps_per_s"] / done[ALONE]["steps_per_s"] for done in rounds]
    return common.median(ratios)


def _sent(speeds: dict[str, Rounds], name: str) -> str:
    every = [done[name]["sent_bytes"] for rounds in speeds.values() for done in rounds]
    return f"{common.median(every):,.0f}"


def paint(results: dict[str, Any], axes: Any) -> None:
    speeds: dict[str, Rounds] = results["speeds"]
    names = [name for name in _measured(speeds) if name != ALONE]
    shares = {
        f"{float(mbit) / 1000:g} Gbit/s": [_share(rounds, name) for name in names]
        for mbit, rounds in speeds.items()
    }
    groups = [TITLES[name].replace(" in ", "\nin ").replace(", ", ",\n") for name in names]
    common.bars(axes, groups, shares)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.tick_params("x", labelsize=7)
    axes.set_ylabel("share of the speed without communication")
    axes.set_title(f"MNIST network, 2 workers, N = {results['every']}")


def main() -> None:
    parser = common.parser(__doc__, HERE, rounds=2)
    ways = list(local_ways.WAYS)
    parser.add_argument("--ways", nargs="+", choices=ways, default=SPEED, help="local steps")
    parser.add_argument("--mbit", type=float, nargs="+", default=[1000.0, 100.0], help="links")
    parser.add_argument("--hidden", type=int, default=2048, help="units of the dense layer")
    parser.add_argument("--every", type=int, default=100, help="steps of an interval")
    parser.add_argument(
        "--long", type=int, default=250, help="steps of an interval, to count bytes; 0: do not"
    )
    args = parser.parse_args()
    try:
        with network.joined() as link:
            found = measure_all(link, args)
    except common.BenchmarkError as error:
        sys.exit(f"slow_link: {error}")
    model = {"hidden": args.hidden, "every": args.every, "long": args.long}
    common.publish({"machine": common.machine(), **model, **found}, args, tables, paint)


if __name__ == "__main__":
    main()
