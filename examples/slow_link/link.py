"""Runs main.py on two "hosts" of this machine that a slow link connects. Needs root and iproute2.

sudo .venv/bin/python examples/slow_link/link.py --mbit 100 --steps 300
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1]))

from benchmarks import network  # noqa: E402

TIMEOUT_S = 1800.0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, default=100.0, help="rate of the link, Mbit/s")
    args, others = parser.parse_known_args()
    try:
        with network.joined() as link:
            link.set_rate(args.mbit * 1e6)
            print(link.run([sys.executable, HERE / "main.py", *others], TIMEOUT_S))
    except network.BenchmarkError as error:
        sys.exit(f"link: {error}")


if __name__ == "__main__":
    main()
