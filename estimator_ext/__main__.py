"""`python -m estimator_ext SCRIPT`: runs an Estimator program as it is, on all ranks."""

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
from estimator_ext.contrib import ROOT, missing
from estimator_ext.errors import UnsupportedError
from estimator_ext.installing import install, use_v1_api
from estimator_ext.sharding import POLICIES
from estimator_ext.whole_files import replace_as_a_whole
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
    if options.script and not os.path.exists(options.script[0]):
        parser.error(f"there is no {options.script[0]!r}. Give the path of a program")
    install(contrib=True)
    if options.v1:
        use_v1_api()
    try:
        cluster = hostopt.Cluster.from_resolver(None)
    except hostopt.ConfigError as error:
        _end(error)
    made: list[object] = []
    refuse_parameter_servers()
    if cluster.size > 1:
        _be_random_alike(cluster, argv)
        replace_as_a_whole()
    if cluster.task is not None:
        train_on_ranks(StrategyOfRanks(options.auto_shard), made.append)
    try:
        _run(options)
    except SystemExit as ended:
        if ended.code:
            raise
    except UnsupportedError as error:
        _end(error)
    except (ImportError, AttributeError) as error:
        unsupported = _unsupported(error)
        if unsupported is None:
            raise
        _end(unsupported)
    if cluster.size > 1 and not made:
        _end(
            UnsupportedError(
                f"the program made no estimator: each of {cluster.size} processes ran all of it "
                "by itself. Run it in one process"
            )
        )


def _be_random_alike(cluster: hostopt.Cluster, argv: Sequence[str]) -> None:
    """Has what a program shuffles in Python, and its sets, be in one order on all ranks."""
    if os.environ.get("PYTHONHASHSEED", "random") == "random":  # is read when Python starts
        sys.stdout.flush()
        command = [sys.executable, "-m", "estimator_ext", *argv]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})
    seed = zlib.crc32(repr(cluster.ring).encode())  # another one in each run
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
    """What the user is told of an error, if the program asked for what TensorFlow removed."""
    if isinstance(error, ImportError):
        name = _missing_from_contrib(error)
        return missing(name) if name else None
    removed = re.search(r"module 'tensorflow' has no attribute '(\w+)'", str(error))
    if removed and hasattr(tf.compat.v1, removed[1]):
        return _of_tensorflow_1(f"tf.{removed[1]}")
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    if "has no attribute 'value'" in str(error) and re.search(r"shape.*\.value", line):
        return _of_tensorflow_1(f"dimensions that have a value ({line})")
    return None


def _of_tensorflow_1(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"the program uses {what}, which only TensorFlow 1 has. Run it with "
        "python -m estimator_ext --v1"
    )


def _missing_from_contrib(error: ImportError) -> str | None:
    """The module of tf.contrib that an import did not find."""
    if not (error.name or "").startswith(ROOT):
        return None
    found = re.search(rf"cannot import name '(\w+)'|{ROOT}\.([\w.]+)", str(error))
    return next(filter(None, found.groups())) if found else None


def _end(error: hostopt.ConfigError) -> NoReturn:
    """Ends the process with one line: a traceback through the program would not help."""
    tell_launcher(error, error.exit_code, None)
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
        choices=POLICIES,
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
