"""`python -m estimator_ext SCRIPT`: runs an Estimator program as it is, on all ranks."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import sys
from collections.abc import Sequence
from typing import NoReturn

import hostopt
from estimator_ext.adoption import train_on_ranks
from estimator_ext.contrib import ROOT, missing
from estimator_ext.errors import UnsupportedError
from estimator_ext.input_kinds import SHARD_POLICIES
from estimator_ext.installing import install, use_v1_api
from estimator_ext.strategy import HostOffloadStrategy
from hostopt.error_report import tell_launcher

__all__: list[str] = []


def main(argv: Sequence[str]) -> None:
    """Run a program.

    Args:
      argv: options of this command, and the program with its arguments.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if not (options.module or options.script):
        parser.error("which program? Give a SCRIPT, or -m and a MODULE")
    install(contrib=True)
    if options.v1:
        use_v1_api()
    if hostopt.Cluster.from_resolver(None).task is not None:
        train_on_ranks(HostOffloadStrategy(auto_shard=options.auto_shard))
    program, *arguments = options.module or options.script
    sys.argv = [program, *arguments]
    try:
        if options.module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(program))
            runpy.run_path(program, run_name="__main__")
    except UnsupportedError as error:
        _end(error)
    except ImportError as error:
        name = _missing_from_contrib(error)
        if name is None:
            raise
        _end(missing(name))


def _missing_from_contrib(error: ImportError) -> str | None:
    """The module of tf.contrib that an import did not find."""
    if not (error.name or "").startswith(ROOT):
        return None
    found = re.search(rf"cannot import name '(\w+)'|{ROOT}\.([\w.]+)", str(error))
    return next(filter(None, found.groups())) if found else None


def _end(error: UnsupportedError) -> NoReturn:
    """Ends the process with one line: a traceback through the program would not help."""
    tell_launcher(error, None)
    print(f"hostopt: {error}", file=sys.stderr)
    raise SystemExit(error.exit_code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m estimator_ext",
        usage="python -m estimator_ext [--v1] [--auto-shard POLICY] SCRIPT|-m MODULE [args ...]",
        description="Run a program that was written for tf.estimator, as it is. In a cluster "
        "(hostopt run, or TF_CONFIG) its estimators train on all ranks.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--auto-shard",
        choices=SHARD_POLICIES,
        default="data",
        help="how TensorFlow divides datasets among the ranks if input_fn has no argument "
        "input_context (default: data)",
    )
    parser.add_argument(
        "--v1",
        action="store_true",
        help="for programs of TensorFlow 1: `import tensorflow` gives tensorflow.compat.v1, "
        "without the behavior of TensorFlow 2",
    )
    remainder = argparse.REMAINDER
    parser.add_argument("-m", dest="module", nargs=remainder, help="run a module")
    parser.add_argument("script", nargs=remainder, help="run a file, with its arguments")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
