"""`python -m estimator_ext SCRIPT`: runs an unmodified Estimator program on all ranks."""

from __future__ import annotations

import argparse
import os
import random
import re
import runpy
import sys
import traceback
import zlib
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import tensorflow as tf

import hostopt
from estimator_ext.adoption import StrategyOfRanks, refuse_parameter_servers, train_on_ranks
from estimator_ext.atomic_files import write_atomically
from estimator_ext.compat import install, use_v1_api
from estimator_ext.contrib import ROOT, missing
from estimator_ext.errors import UnsupportedError
from estimator_ext.sharding import POLICIES
from hostopt.error_report import write_report

__all__: list[str] = []


def main(argv: Sequence[str]) -> None:
    """Runs a program.

    Args:
      argv: options of this command, then the program and its arguments.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if not (options.module or options.script):
        parser.error("no program to run: give a SCRIPT, or -m and a MODULE")
    if options.script and not os.path.exists(options.script[0]):
        parser.error(f"{options.script[0]!r} does not exist: give the path of a program")
    install(contrib=True)
    if options.v1:
        use_v1_api()
    try:
        cluster = hostopt.Cluster.from_resolver(None)
    except hostopt.ConfigError as error:
        _exit(error)
    estimators: list[object] = []
    refuse_parameter_servers()
    if cluster.size > 1:
        _use_common_seeds(cluster, argv)
        write_atomically()
    if cluster.task is not None:
        train_on_ranks(StrategyOfRanks(options.auto_shard, options.loss), estimators.append)
    try:
        _run(options)
    except SystemExit as ended:
        if ended.code:
            raise
    except UnsupportedError as error:
        _exit(error)
    except (ImportError, AttributeError) as error:
        unsupported = _unsupported(error)
        if unsupported is None:
            raise
        _exit(unsupported)
    if cluster.size > 1 and not estimators:
        _exit(
            UnsupportedError(
                f"the program created no estimator: each of {cluster.size} processes ran it "
                "independently. Run it in one process"
            )
        )


def _use_common_seeds(cluster: hostopt.Cluster, argv: Sequence[str]) -> None:
    """Makes Python's shuffles and the order of sets the same on all ranks."""
    if os.environ.get("PYTHONHASHSEED", "random") == "random":  # Python reads it at its start
        sys.stdout.flush()
        command = [sys.executable, "-m", "estimator_ext", *argv]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})
    seed = zlib.crc32(repr(cluster.ring).encode())  # differs between runs
    random.seed(seed)
    np.random.seed(seed)


def _run(options: argparse.Namespace) -> None:
    program, *arguments = options.module or options.script
    sys.argv = [program, *arguments]
    if options.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")


def _unsupported(error: ImportError | AttributeError) -> UnsupportedError | None:
    """Returns the error to show if the program uses what TensorFlow removed, or else None."""
    if isinstance(error, ImportError):
        name = _missing_from_contrib(error)
        return missing(name) if name else None
    removed = re.search(r"module 'tensorflow' has no attribute '(\w+)'", str(error))
    if removed and hasattr(tf.compat.v1, removed[1]):
        return _needs_tensorflow_1(f"tf.{removed[1]}")
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    if "has no attribute 'value'" in str(error) and re.search(r"shape.*\.value", line):
        return _needs_tensorflow_1(f"the attribute value of dimensions ({line})")
    return None


def _needs_tensorflow_1(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"the program uses {name}, which only TensorFlow 1 has. Run it with "
        "python -m estimator_ext --v1"
    )


def _missing_from_contrib(error: ImportError) -> str | None:
    """Returns the module of tf.contrib that an import did not find."""
    if not (error.name or "").startswith(ROOT):
        return None
    match = re.search(rf"cannot import name '(\w+)'|{ROOT}\.([\w.]+)", str(error))
    return next(filter(None, match.groups())) if match else None


def _exit(error: hostopt.ConfigError) -> NoReturn:
    """Ends the process with one line, as a traceback through the program would not help."""
    write_report(error, error.exit_code, None)
    print(f"hostopt: {error}", file=sys.stderr)
    raise SystemExit(error.exit_code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m estimator_ext",
        usage="python -m estimator_ext [--v1] [--auto-shard POLICY] [--loss KIND] "
        "SCRIPT|-m MODULE [args ...]",
        description="Run an unmodified program that was written for tf.estimator. In a cluster "
        "(hostopt run, or TF_CONFIG) its estimators train on all ranks.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--auto-shard",
        choices=POLICIES,
        default="data",
        help="how TensorFlow shards datasets over the ranks if input_fn has no argument "
        "input_context (default: data)",
    )
    parser.add_argument(
        "--loss",
        choices=("mean", "sum"),
        default="",
        help="what the losses are over the examples of a batch, if their graphs do not show it",
    )
    parser.add_argument(
        "--v1",
        action="store_true",
        help="for programs of TensorFlow 1: `import tensorflow` imports tensorflow.compat.v1, "
        "with the behavior of TensorFlow 1",
    )
    remainder = argparse.REMAINDER
    parser.add_argument(
        "-m", dest="module", nargs=remainder, help="run a module, with its arguments"
    )
    parser.add_argument("script", nargs=remainder, help="run a file, with its arguments")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
