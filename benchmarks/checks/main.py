"""Cost of the checks in every step: MNIST with and without them, in interleaved rounds."""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import certificates, common

HERE = Path(__file__).resolve().parent
RANK = HERE.parent / "mnist_scaling" / "rank.py"
STEPS = 1000  # timed steps; the ranks compare their variables in one of them
_OFF = {"HOSTOPT_DESYNC_CHECK_STEPS": "0", "HOSTOPT_CHECKSUM": "false"}
SYSTEMS: dict[str, tuple[str, dict[str, str]]] = {
    "memory": ("shared memory, checked", {"HOSTOPT_COMMUNICATION": "auto"}),
    "memory-off": ("shared memory, unchecked", {**_OFF, "HOSTOPT_COMMUNICATION": "auto"}),
    "grpc": ("gRPC, checked", {"HOSTOPT_COMMUNICATION": "grpc"}),
    "grpc-off": ("gRPC, unchecked", {**_OFF, "HOSTOPT_COMMUNICATION": "grpc"}),
    "grpc-checksum": (
        "gRPC, checked, with checksums of the data",
        {"HOSTOPT_COMMUNICATION": "grpc", "HOSTOPT_CHECKSUM": "true"},
    ),
    "grpc-tls": ("gRPC over mutual TLS, checked", {"HOSTOPT_COMMUNICATION": "grpc"}),
}
_PAIRS = {
    "memory": "memory-off",
    "grpc": "grpc-off",
    "grpc-checksum": "grpc-off",
    "grpc-tls": "grpc",
}
_TIMEOUT_S = 400.0


def measure(system: str, hidden: int) -> float:
    """Runs two workers once.

    Args:
      system: one of SYSTEMS.
      hidden: units of the dense layer.

    Returns:
      Steps per second of a worker, the mean of both.

    Raises:
      BenchmarkError: a worker failed.
    """
    worker: list[object] = [sys.executable, RANK, "--system", "hostopt", "--hidden", hidden]
    worker += ["--steps", STEPS]
    if system.endswith("-off"):
        worker.append("--unchecked")
    environ = {**common.SAME_THREADS, **SYSTEMS[system][1]}
    with tempfile.TemporaryDirectory() as meeting:
        if system == "grpc-tls":
            environ["HOSTOPT_TLS_DIR"] = certificates.write_tls_dir(meeting)
        command = common.hostopt_run(2, *worker, "--meeting", meeting)
        results = common.results_in(common.run(command, _TIMEOUT_S, environ), 2)
    return sum(result["steps_per_s"] for result in results) / 2


def tables(results: dict[str, Any]) -> str:
    """Formats medians, and the costs of checks and TLS: medians of the ratio of each round."""
    result = results["steps_per_s"]
    rows = []
    measured = _measured(result)
    for system in measured:
        cells = [f"{common.median(rates[system]):.1f}" for rates in result.values()]
        if _PAIRS.get(system) in measured:
            for number, rates in enumerate(result.values()):
                cells[number] += f" ({_cost(rates[system], rates[_PAIRS[system]])})"
        rows.append([SYSTEMS[system][0], *cells])
    return common.table(["steps/s (cost)", *(f"U = {u}" for u in result)], rows)


def _measured(result: dict[int, dict[str, list[float]]]) -> list[str]:
    return [system for system in SYSTEMS if all(system in rates for rates in result.values())]


def _cost(checked: list[float], unchecked: list[float]) -> str:
    ratios = [1.0 - on / off for on, off in zip(checked, unchecked)]
    return f"{100 * common.median(ratios):.1f} %"


def paint(results: dict[str, Any], axes: Any) -> None:
    result = results["steps_per_s"]
    shares = {
        SYSTEMS[system][0]: [
            common.median([on / off for on, off in zip(rates[system], rates[pair])])
            for rates in result.values()
        ]
        for system, pair in _PAIRS.items()
        if {system, pair} <= set(_measured(result))
    }
    common.bars(axes, [f"U = {u}" for u in result], shares)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("share of the speed without them")
    axes.set_title("MNIST network, 2 workers on one machine")


def main() -> None:
    parser = common.parser(__doc__, HERE)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 512], help="U")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    args = parser.parse_args()
    result = {}
    for hidden in args.hidden:
        measures = {s: functools.partial(measure, s, hidden) for s in args.systems}
        result[hidden] = common.in_rounds(measures, args.rounds, f"U = {hidden}")
    results = {"machine": common.machine(), "threads": common.SAME_THREADS, "steps_per_s": result}
    common.publish(results, args, tables, paint)


if __name__ == "__main__":
    main()
