"""Steps per second of two workers, with and without communication, in interleaved rounds."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

SYSTEMS = {
    "none": "no communication (two independent runs): the limit",
    "hostopt": "hostopt, gRPC ring",
    "mwms": "MultiWorkerMirroredStrategy, RING",
}
HERE = Path(__file__).parent


def measure(system: str, hidden: int) -> float:
    """Run two workers once.

    Args:
      system: one of SYSTEMS.
      hidden: units of the dense layer.

    Returns:
      Steps per second of each worker, the mean of both.
    """
    command = [sys.executable, "-m", "hostopt.cli", "run", "-np", "2", "--", sys.executable]
    command += [str(HERE / "rank.py"), "--system", system, "--hidden", str(hidden)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    rates = [float(rate) for rate in re.findall(r"steps/s ([0-9.]+)", done.stdout)]
    if len(rates) != 2:
        raise RuntimeError(f"wanted the rates of 2 workers, got {rates}:\n{done.stderr}")
    return statistics.mean(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=HERE / "results.json")
    args = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    for hidden in args.hidden:
        rates: dict[str, list[float]] = {system: [] for system in args.systems}
        found[str(hidden)] = rates
        for number in range(args.rounds):
            for system in args.systems:
                rates[system].append(measure(system, hidden))
                rate = rates[system][-1]
                print(f"U={hidden} round {number + 1} {system}: {rate:.1f}", file=sys.stderr)
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    columns = [f"U = {hidden}" for hidden in args.hidden]
    print("| steps/s of each worker | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for system in args.systems:
        cells = []
        for rates in found.values():
            median = statistics.median(rates[system])
            cells.append(f"{median:.0f} ({median / statistics.median(rates['none']):.2f})")
        print(f"| {SYSTEMS[system]} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
