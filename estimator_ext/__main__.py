"""`python -m estimator_ext SCRIPT`: runs an unmodified Estimator program on all ranks."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import sys
import traceback
from collections.abc import Sequence

import tensorflow as tf

import hostopt
from estimator_ext.compat.adoption import Ranks, prepare_program
from estimator_ext.compat.check import check
from estimator_ext.compat.compat import install
from estimator_ext.compat.contrib.names import ROOT, missing
from estimator_ext.compat.tensorflow_1 import (
    file_of_module,
    is_in_tensorflow_1,
    use_of_tensorflow_1,
)
from estimator_ext.errors import UnsupportedError
from estimator_ext.pipelines.sharding import POLICIES
from hostopt.adapters.discover import set_tf_config
from hostopt.connect import exit_in_one_line, original_of

_log = tf.get_logger()

_AUTO_SHARD = "data"

# A name that the module `tensorflow`, or one in it, does not have: `train` and `Optimizer`.
_REMOVED = r"module 'tensorflow(?:\._api\.v2)?(?:\.([\w.]+))?' has no attribute '(\w+)'"
# `BoostedTreesClassifier`
_NOT_IN_ESTIMATOR = r"module 'tensorflow_estimator\.[\w.]*' has no attribute '(\w+)'"


def main(argv: Sequence[str]) -> None:
    """Runs a program; `argv` has options of this command, the program and its arguments."""
    parser = _parser()
    options = parser.parse_args(argv)
    if not (options.module or options.script):
        parser.error("no program to run: give a SCRIPT, or -m and a MODULE")
    if options.hvd and (options.loss or options.auto_shard != _AUTO_SHARD):
        parser.error(
            "--hvd is for programs that divide their data and reduce by themselves: leave "
            "out --auto-shard and --loss"
        )
    if options.script and not os.path.exists(options.script[0]):
        parser.error(f"{options.script[0]!r} does not exist: give the path of a program")
    try:
        if options.check:
            install(contrib=True)
            sys.exit(check(_path(options)))
        set_tf_config(hostopt.Options().with_environment())
        if hostopt.Cluster.from_tf_config().size > 1:
            _fix_order_of_sets(argv)
        is_v1 = options.v1 or _is_of_tensorflow_1(options)
        ranks = prepare_program(options.auto_shard, options.loss, is_v1, options.hvd)
        if not options.hvd:
            ranks.find()
    except hostopt.HostOptError as error:
        exit_in_one_line(error)
    try:
        _run(options)
        _check_used(ranks, options.hvd)
    except Exception as error:
        refusal = _refusal(error)
        if refusal is None:
            raise
        exit_in_one_line(refusal)


def _fix_order_of_sets(argv: Sequence[str]) -> None:
    """Gives sets the same order on all ranks: starts Python again, which reads that once."""
    if os.environ.get("PYTHONHASHSEED", "random") == "random":
        sys.stdout.flush()
        command = [sys.executable, "-m", "estimator_ext", *argv]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})


def _is_of_tensorflow_1(options: argparse.Namespace) -> bool:
    install(contrib=True)
    use = use_of_tensorflow_1(_path(options))
    if use:
        _log.info("the program uses %s, as in TensorFlow 1: it runs as with --v1", use)
    return bool(use)


def _path(options: argparse.Namespace) -> str:
    path: str = options.script[0] if options.script else file_of_module(options.module[0])
    return path


def _check_used(ranks: Ranks, calls_init: bool) -> None:
    if ranks.are_used:
        return
    # the program may have set TF_CONFIG, and never asked for it
    cluster = hostopt.Cluster.from_tf_config() if calls_init else ranks.find()
    if cluster is not None and cluster.size > 1:
        what = "never called hvd.init()" if calls_init else "created no estimator"
        remedy = "Leave out --hvd, or run it" if calls_init else "Run it"
        raise UnsupportedError(
            f"the program {what}: each of {cluster.size} processes ran it independently. "
            f"{remedy} in one process"
        )


def _run(options: argparse.Namespace) -> None:
    program, *arguments = options.module or options.script
    sys.argv = [program, *arguments]
    try:
        if options.module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(program))
            runpy.run_path(program, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise


def _refusal(error: Exception) -> hostopt.ConfigError | None:
    """Returns the error to show in one line, or None for any other error of the program."""
    original = original_of(error)
    if isinstance(original, hostopt.ConfigError):
        return original
    # or else the program may use what TensorFlow removed
    if isinstance(error, ImportError):
        return _refusal_of_import(error)
    # AutoGraph raises another error, whose text contains that of the error and the line
    text = f"{error}\n{traceback.extract_tb(error.__traceback__)[-1].line}"
    if isinstance(error, ValueError) and "InMemoryEvaluator supports only single" in text:
        return UnsupportedError(
            "the program evaluates in an InMemoryEvaluatorHook, which supports one process. Use "
            "tf.estimator.train_and_evaluate, or run it in one process"
        )
    if isinstance(error, TypeError):
        argument = re.search(r"unexpected keyword argument '(num_gpus\w*)'", text)
        if not argument or "Strategy(" not in text:
            return None
        return UnsupportedError(
            f"the program creates a strategy with {argument[1]}, as in TensorFlow 1. Remove it: "
            "its estimators train on the ranks that `hostopt run -np N` starts"
        )
    return _refusal_of_name(text) if isinstance(error, AttributeError) else None


def _refusal_of_name(text: str) -> UnsupportedError | None:
    gone = re.search(_NOT_IN_ESTIMATOR, text)
    if gone:
        return UnsupportedError(
            f"the program uses tf.estimator.{gone[1]}, which the last tensorflow_estimator lacks. "
            "It needs the release of TensorFlow that the program was written for"
        )
    removed = re.search(_REMOVED, text)
    line = re.search(r".*shape.*\.value.*", text)
    if removed and is_in_tensorflow_1(name := ".".join(filter(None, removed.groups()))):
        use = f"tf.{name}"
    elif line and "has no attribute 'value'" in text:
        use = f"the attribute value of dimensions ({line[0].strip()})"
    else:
        return None
    return UnsupportedError(
        f"the program uses {use}, which only TensorFlow 1 has. Run it with "
        "python -m estimator_ext --v1"
    )


def _refusal_of_import(error: ImportError) -> UnsupportedError | None:
    module = error.name or ""
    if module.partition(".")[0] in ("horovod", "smdistributed"):
        reason = "is not installed. Run it with python -m estimator_ext --hvd, which has most of "
        reason += "its names"
        if "horovod" in sys.modules:
            reason = "hostopt does not have. Remove the code that needs it"
        return UnsupportedError(f"the program imports {module}, which {reason}")
    if not module.startswith(ROOT):
        return None
    found = re.search(r"cannot import name '(\w+)'", str(error))
    parts = [module[len(ROOT) + 1 :], found[1] if found else ""]
    name = ".".join(filter(None, parts))
    return missing(name) if name else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m estimator_ext",
        usage="python -m estimator_ext [--check] [--v1] [--hvd] [--auto-shard POLICY] "
        "[--loss KIND] SCRIPT|-m MODULE [args ...]",
        description="Run an unmodified program that was written for tf.estimator. In a cluster "
        "(hostopt run, mpirun, srun, or TF_CONFIG) its estimators train on all ranks.",
        allow_abbrev=False,
    )
    version = f"hostopt {hostopt.__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument(
        "--check",
        action="store_true",
        help="say what a program, or each program of a folder, needs to run; do not run it",
    )
    parser.add_argument(
        "--auto-shard",
        choices=POLICIES,
        default=_AUTO_SHARD,
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
        "with the behavior of TensorFlow 1 (default: if the program surely uses such a name)",
    )
    parser.add_argument(
        "--hvd",
        action="store_true",
        help="for programs of Horovod or SageMaker's library: `import horovod.tensorflow` and "
        "`import smdistributed.dataparallel.tensorflow` import hostopt.tensorflow",
    )
    remainder = argparse.REMAINDER
    parser.add_argument(
        "-m", dest="module", nargs=remainder, help="run a module, with its arguments"
    )
    parser.add_argument("script", nargs=remainder, help="run a file, with its arguments")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
