"""The command ``hostopt``."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hostopt import bench, descriptors, tuning
from hostopt.cluster import Cluster
from hostopt.connect import connect, connect_ring
from hostopt.doctor.checking import WRONG
from hostopt.doctor.examine import examine
from hostopt.errors import ConfigError, HostOptError
from hostopt.launch import output
from hostopt.launch.launcher import launch
from hostopt.launch.task_group import start_error
from hostopt.options import MAX_COUNT, MIN_TIMEOUT_S, YEAR_S, Options
from hostopt.telemetry.trace_files import merge
from hostopt.telemetry.trace_picture import draw
from hostopt.versions import VERSION

__all__: list[str] = []

_USAGE_ERROR = 2
_MAX_TASKS = 1024
_MAX_TIMES = 1_000_000
_SIZES = ("64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB")
_REPETITIONS = 7


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      argv: arguments without the program's name; None takes the arguments of this process.

    Returns:
      Exit code: 0 on success, the code of the task or error that ended the run, or 2 if the
      command to run does not exist.

    Raises:
      SystemExit: the arguments are invalid (code 2), or ask for help or the version (code 0).
    """
    descriptors.open_closed_descriptors()
    options = _parser().parse_args(argv)
    stream = output.LogStream(output.ERR)
    logging.basicConfig(stream=stream, level=logging.INFO, format="hostopt: %(message)s")
    try:
        return int(options.run(options) or 0)
    except HostOptError as error:
        _print_error(error)
        return error.exit_code
    finally:
        output.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hostopt", description="Host-offload training on several hosts.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"hostopt {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    run = commands.add_parser(
        "run",
        help="start all processes of a cluster on this machine",
        usage="hostopt run -np N [--evaluators K] [--max-restarts R [--min-np M]] "
        "[--restore-previous] [--autotune] [--bind-to WHAT] [--] command [args ...]",
        description="Start one command as chief, workers and evaluators, each with its own "
        "TF_CONFIG, and end them together. A command that ends in .py is run with this Python. "
        "HOSTOPT_SLOT is set to the slot of the rank on this machine, 0 to N-1, which does not "
        "change when ranks are renumbered.",
        allow_abbrev=False,
    )
    run.add_argument(
        "-np",
        type=_integer(1, _MAX_TASKS),
        required=True,
        metavar="N",
        help="number of ranks: 1 chief, N-1 workers",
    )
    run.add_argument(
        "--evaluators",
        type=_integer(0, _MAX_TASKS),
        default=0,
        metavar="K",
        help="number of evaluators (default: 0)",
    )
    run.add_argument(
        "--max-restarts",
        type=_integer(0, _MAX_TIMES),
        default=0,
        metavar="R",
        help="restart the ranks up to R times after a failure that may be temporary (default: 0)",
    )
    run.add_argument(
        "--min-np",
        type=_integer(1, _MAX_TASKS),
        metavar="M",
        help="restart without ranks that fail twice in a row, with at least M ranks (default: N)",
    )
    run.add_argument(
        "--restore-previous",
        action="store_true",
        help="if the newest checkpoint is damaged, resume from the newest intact one",
    )
    run.add_argument(
        "--autotune",
        action="store_true",
        help="choose communication, segment and bucket sizes by trial before the first step",
    )
    run.add_argument(
        "--bind-to",
        choices=["cores", "none"],
        default="cores",
        help="bind each rank to its share of the cores, or leave them to all (default: cores)",
    )
    run.add_argument(
        "command", nargs=argparse.REMAINDER, help="the command that every process runs"
    )
    run.set_defaults(run=_run, parser=run)
    trace = commands.add_parser("trace", help="process trace files, which HOSTOPT_TIMELINE writes")
    _add_trace_commands(trace.add_subparsers(title="commands", metavar="command", required=True))
    _add_bench(
        commands.add_parser(
            "bench",
            help="time all-reduces",
            description="Time all-reduces of float32 over N ranks on this machine with -np, or "
            "otherwise over the cluster in TF_CONFIG: then start every rank with the same "
            "arguments. Rank 0 prints a table.",
            allow_abbrev=False,
        )
    )
    _add_doctor(
        commands.add_parser(
            "doctor",
            help="check this machine and the cluster",
            description="Check this machine and, if TF_CONFIG names a cluster, this task in it. "
            "Start it on all ranks at the same time, with the TF_CONFIG and the HOSTOPT_* "
            "variables of the training, and the ranks also check their clocks, versions and "
            "links. Exits with 78 if anything is WRONG.",
            allow_abbrev=False,
        )
    )
    return parser


def _add_trace_commands(commands: Any) -> None:
    merging = commands.add_parser(
        "merge",
        help="merge the files of all ranks into one",
        description="Merge the files of several ranks into one trace, in the time of rank 0's "
        "clock. Open it at https://ui.perfetto.dev or chrome://tracing.",
        allow_abbrev=False,
    )
    merging.add_argument("files", nargs="+", help="the trace files, one for each rank")
    merging.add_argument("-o", "--output", required=True, metavar="FILE", help="the merged trace")
    merging.set_defaults(run=lambda options: merge(options.files, options.output))
    drawing = commands.add_parser(
        "draw",
        help="draw one step",
        description="Draw one step of a trace. Needs matplotlib: pip install 'hostopt[draw]'.",
        allow_abbrev=False,
    )
    drawing.add_argument("file", help="a trace of one rank, or a merged one")
    drawing.add_argument("-o", "--output", required=True, metavar="FILE", help="the image file")
    drawing.add_argument(
        "--step",
        type=_integer(0, MAX_COUNT),
        metavar="N",
        help="number of the step, from 0 (default: the last)",
    )
    drawing.set_defaults(run=lambda options: draw(options.file, options.output, options.step))


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-np", type=_integer(1, _MAX_TASKS), metavar="N", help="number of ranks on this machine"
    )
    parser.add_argument(
        "--sizes",
        type=_size,
        nargs="+",
        metavar="SIZE",
        help=f"sizes of the buffers (default: {' '.join(_SIZES)})",
    )
    parser.add_argument(
        "--repetitions",
        type=_integer(1, _MAX_TIMES),
        metavar="K",
        help=f"number of runs; the table shows their median (default: {_REPETITIONS})",
    )
    parser.add_argument(
        "--communication",
        choices=["auto", "grpc+tcp", "grpc", "shm"],
        help="transport between the ranks",
    )
    parser.add_argument(
        "--compression", choices=["none", "fp16", "bf16"], help="wire format of the values"
    )
    parser.add_argument(
        "--suggest",
        action="store_true",
        help="try communications, segment and bucket sizes instead, and print the best ones",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the times to FILE")
    parser.add_argument("--quiet", action="store_true", help="do not print the table")
    parser.set_defaults(run=_bench, parser=parser)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
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


def _bench(options: argparse.Namespace) -> int:
    for name in ("communication", "compression"):  # connect() reads these on every rank
        if getattr(options, name) is not None:
            os.environ[f"HOSTOPT_{name.upper()}"] = getattr(options, name)
    if options.suggest and (options.sizes or options.repetitions):
        options.parser.error("--suggest chooses sizes and repetitions: omit those arguments")
    options.sizes = options.sizes or [_size(text) for text in _SIZES]
    options.repetitions = options.repetitions or _REPETITIONS
    if options.np is not None:
        return _bench_here(options)
    if "TF_CONFIG" not in os.environ:
        options.parser.error("give -np N, or start each rank with its TF_CONFIG")
    results: Sequence[Any]
    if options.suggest:
        cluster, start = Cluster.from_tf_config(), Options().with_environment()
        rank, results = cluster.rank, tuning.tune(functools.partial(connect_ring, cluster), start)
    else:
        with connect() as communicator:
            results = bench.run(communicator, options.sizes, options.repetitions)
        rank = communicator.rank
    if rank == 0:
        if options.json is not None:
            _kind(options).save(options.json, results)
        if not options.quiet:
            _print_results(options, results)
    return 0


def _bench_here(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as directory:
        path = options.json or Path(directory, "times.json")
        command = [sys.executable, "-m", "hostopt.cli", "bench", "--quiet", "--json", str(path)]
        if options.suggest:
            command.append("--suggest")
        else:
            command += ["--repetitions", str(options.repetitions)]
            command += ["--sizes", *map(str, options.sizes)]
        code = launch(command, size=options.np)
        if code == 0 and not options.quiet:
            _print_results(options, _kind(options).load(path))
        return code


def _kind(options: argparse.Namespace) -> Any:
    return tuning if options.suggest else bench


def _print_results(options: argparse.Namespace, results: Sequence[Any]) -> None:
    print(_kind(options).format_table(results))
    if options.suggest:
        print(f"\n{tuning.format_variables(tuning.fastest(results))}")


def _run(options: argparse.Namespace) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        options.parser.error("no command to run: append one, for example main.py")
    if options.min_np is not None and options.min_np > options.np:
        options.parser.error(f"--min-np {options.min_np} is greater than -np {options.np}")
    if options.min_np is not None and not options.max_restarts:
        options.parser.error("--min-np needs --max-restarts: it takes effect at a restart")
    if options.restore_previous:  # every rank inherits it
        os.environ["HOSTOPT_RESTORE_PREVIOUS"] = "true"
    if options.autotune:
        os.environ["HOSTOPT_AUTOTUNE"] = "true"
    try:
        return launch(
            command,
            size=options.np,
            evaluators=options.evaluators,
            max_restarts=options.max_restarts,
            min_size=options.min_np,
            binds=options.bind_to == "cores",
        )
    except FileNotFoundError as error:
        _print_error(error)
        return _USAGE_ERROR
    except OSError as error:
        descriptors.check(error)  # has better advice if no descriptor is left
        raise start_error(error) from None


def _print_error(error: Exception) -> None:
    output.ERR.write(f"hostopt: {error}\n".encode(errors="backslashreplace"))


def _integer(least: int, most: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not from {least} to {most}")
        return value

    return integer


def _seconds(text: str) -> float:
    value = float(text)
    if not MIN_TIMEOUT_S <= value <= YEAR_S:
        raise argparse.ArgumentTypeError(f"{text} is not from {MIN_TIMEOUT_S} to {YEAR_S:.0f} s")
    return value


def _size(text: str) -> int:
    try:
        return bench.parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
