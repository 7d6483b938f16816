"""`hostopt doctor`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from hostopt.doctor.checking import WRONG
from hostopt.doctor.examine import examine
from hostopt.errors import ConfigError
from hostopt.options import MIN_TIMEOUT_S, YEAR_S


def add(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine and the cluster",
        description="Check this machine and, if TF_CONFIG names a cluster, this task in it. "
        "Start it on all ranks at the same time, with the TF_CONFIG and the HOSTOPT_* "
        "variables of the training, and the ranks also check their clocks, versions and "
        "links. Exits with 78 if anything is WRONG.",
        allow_abbrev=False,
    )
    parser.add_argument("--model-dir", metavar="DIR", help="model_dir of the training")
    parser.add_argument(
        "--timeout-s",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="seconds to wait for the other ranks (default: 10)",
    )
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    healthy = True
    for finding in examine(os.environ, options.model_dir, options.timeout_s):
        print(finding, flush=True)
        healthy = healthy and finding.verdict != WRONG
    return 0 if healthy else ConfigError.exit_code


def _seconds(text: str) -> float:
    value = float(text)
    if not MIN_TIMEOUT_S <= value <= YEAR_S:
        raise argparse.ArgumentTypeError(f"{text} is not from {MIN_TIMEOUT_S} to {YEAR_S:.0f} s")
    return value
