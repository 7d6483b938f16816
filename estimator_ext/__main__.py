"""`python -m estimator_ext SCRIPT`: runs an Estimator program as it is, on the ranks of a cluster."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

import hostopt
from estimator_ext.adoption import train_on_ranks
from estimator_ext.input_kinds import SHARD_POLICIES
from estimator_ext.installing import install
from estimator_ext.strategy import HostOffloadStrategy

__all__: list[str] = []


def main(argv: Sequence[str]) -> None:
    """Run a program.

    Args:
      argv: options of this command, and the program with its arguments.
    """
    options = _parser().parse_args(argv)
    install(contrib=True)
    if hostopt.Cluster.from_resolver(None).task is not None:
        train_on_ranks(HostOffloadStrategy(auto_shard=options.auto_shard))
    program = options.module or options.arguments.pop(0)
    sys.argv = [program, *options.arguments]
    if options.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m estimator_ext",
        usage="python -m estimator_ext [--auto-shard POLICY] [SCRIPT | -m MODULE] [args ...]",
        description="Run a program that was written for tf.estimator, as it is. In a cluster "
        "(hostopt run, or TF_CONFIG) its estimators train on all ranks.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--auto-shard",
        choices=SHARD_POLICIES,
        default="auto",
        help="how TensorFlow divides datasets among the ranks if input_fn has no argument "
        "input_context (default: auto)",
    )
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module as a script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
