"""The command ``hostopt``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hostopt import bench, descriptors, output
from hostopt.doctor.checking import WRONG
from hostopt.doctor.examine import examine
from hostopt.errors import ConfigError, HostOptError
from hostopt.launch import launch
from hostopt.options import MAX_COUNT, MIN_TIMEOUT_S, YEAR_S
from hostopt.trace_files import merge
from hostopt.trace_picture import draw
from hostopt.versions import VERSION

__all__: list[str] = []

_USAGE_ERROR = 2
_MAX_TASKS = 1024
_MAX_TIMES = 1_000_000
_SIZES = ("64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: arguments without the program's name; None takes those of this process.

    Returns:
      Exit code: 0, that of the task or error that ended the run, or 2 for a command that does not
      exist.

    Raises:
      SystemExit: the arguments cannot be used (code 2), or ask for help or the version (code 0).
    """
    output.open_closed_descriptors()
    options = _parser().parse_args(argv)
    stream = output.LogStream(output.ERR)
    logging.basicConfig(stream=stream, level=logging.INFO, format="hostopt: %(message)s")
    try:
        return int(options.run(options) or 0)
    except HostOptError as error:
        _complain(error)
        return error.exit_code
    finally:
        output.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hostopt", description="Host-offload training over gRPC.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"hostopt {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    run = commands.add_parser(
        "run",
        help="start all processes of a cluster on this machine",
        usage="hostopt run -np N [--evaluators K] [--max-restarts R [--min-np M]] "
        "[--restore-previous] [--] command [args ...]",
        description="Start one command as chief, workers and evaluators, each with its own "
        "TF_CONFIG, and end them together. A command that ends in .py is run with this Python. "
        "Each rank finds in HOSTOPT_SLOT its place on this machine, 0 to N-1, which stays its own "
        "when ranks are renumbered.",
        allow_abbrev=False,
    )
    run.add_argument(
        "-np",
        type=_whole(1, _MAX_TASKS),
        required=True,
        metavar="N",
        help="ranks: 1 chief, N-1 workers",
    )
    run.add_argument(
        "--evaluators",
        type=_whole(0, _MAX_TASKS),
        default=0,
        metavar="K",
        help="evaluators (default: 0)",
    )
    run.add_argument(
        "--max-restarts",
        type=_whole(0, _MAX_TIMES),
        default=0,
        metavar="R",
        help="start the ring again up to R times, where that may help (default: 0)",
    )
    run.add_argument(
        "--min-np",
        type=_whole(1, _MAX_TASKS),
        metavar="M",
        help="go on with down to M ranks, without those that fail twice in a row (default: N)",
    )
    run.add_argument(
        "--restore-previous",
        action="store_true",
        help="where the newest checkpoint cannot be read, go on from the newest that can",
    )
    run.add_argument("command", nargs=argparse.REMAINDER, help="what every process runs")
    run.set_defaults(run=_run, parser=run)
    trace = commands.add_parser("trace", help="work with the files that HOSTOPT_TIMELINE names")
    _add_trace_commands(trace.add_subparsers(title="commands", metavar="command", required=True))
    _add_bench(
        commands.add_parser(
            "bench",
            help="time all-reduces",
            description="Time all-reduces of float32: over N ranks on this machine with -np, else "
            "over the cluster that TF_CONFIG names, where every rank is started with the same "
            "arguments. Rank 0 prints a table.",
            allow_abbrev=False,
        )
    )
    _add_doctor(
        commands.add_parser(
            "doctor",
            help="check this machine and its place in the cluster",
            description="Check this machine and, where TF_CONFIG names a cluster, this task's "
            "place in it. Start it on all ranks at the same time, with the TF_CONFIG and the "
            "HOSTOPT_* variables of the training, and the ranks also check what is between them. "
            "Exits with 78 where anything is WRONG.",
            allow_abbrev=False,
        )
    )
    return parser


def _add_trace_commands(commands: Any) -> None:
    merging = commands.add_parser(
        "merge",
        help="join the files of all ranks into one",
        description="Join the files of several ranks into one trace, by the clock of rank 0. Open "
        "it at https://ui.perfetto.dev or chrome://tracing.",
        allow_abbrev=False,
    )
    merging.add_argument("files", nargs="+", help="one file for each rank")
    merging.add_argument("-o", "--output", required=True, metavar="FILE", help="the joined trace")
    merging.set_defaults(run=lambda options: merge(options.files, options.output))
    drawing = commands.add_parser(
        "draw",
        help="draw one step as a picture",
        description="Draw one step of a trace. Needs matplotlib: pip install 'hostopt[draw]'.",
        allow_abbrev=False,
    )
    drawing.add_argument("file", help="a trace of one rank or a joined one")
    drawing.add_argument("-o", "--output", required=True, metavar="FILE", help="the picture")
    drawing.add_argument(
        "--step",
        type=_whole(0, MAX_COUNT),
        metavar="N",
        help="which step, from 0 (default: the last)",
    )
    drawing.set_defaults(run=lambda options: draw(options.file, options.output, options.step))


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-np", type=_whole(1, _MAX_TASKS), metavar="N", help="ranks on this machine"
    )
    parser.add_argument(
        "--sizes",
        type=_size,
        nargs="+",
        default=[_size(text) for text in _SIZES],
        metavar="SIZE",
        help=f"sizes to reduce (default: {' '.join(_SIZES)})",
    )
    parser.add_argument(
        "--repetitions",
        type=_whole(1, _MAX_TIMES),
        default=7,
        metavar="K",
        help="the table shows the median of K (default: 7)",
    )
    parser.add_argument(
        "--communication", choices=["auto", "grpc", "shm"], help="way between the ranks"
    )
    parser.add_argument("--compression", choices=["none", "fp16", "bf16"], help="on the wire")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times there as well")
    parser.add_argument("--quiet", action="store_true", help="print no table")
    parser.set_defaults(run=_bench, parser=parser)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-dir", metavar="DIR", help="where the training writes")
    parser.add_argument(
        "--timeout-s",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="how long to wait for the other ranks (default: 10)",
    )
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    healthy = True
    for finding in examine(os.environ, options.model_dir, options.timeout_s):
        print(finding, flush=True)
        healthy = healthy and finding.verdict != WRONG
    return 0 if healthy else ConfigError.exit_code


def _bench(options: argparse.Namespace) -> int:
    for name in ("communication", "compression"):  # where connect() looks for them, on every rank
        if getattr(options, name) is not None:
            os.environ[f"HOSTOPT_{name.upper()}"] = getattr(options, name)
    if options.np is not None:
        return _bench_here(options)
    if "TF_CONFIG" not in os.environ:
        options.parser.error("say -np N, or start each rank with its TF_CONFIG")
    rank, timings = bench.run(options.sizes, options.repetitions)
    if rank == 0 and options.json is not None:
        bench.save(options.json, timings)
    if rank == 0 and not options.quiet:
        print(bench.format_table(timings))
    return 0


def _bench_here(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as directory:
        path = options.json or Path(directory, "times.json")
        command = [sys.executable, "-m", "hostopt.cli", "bench", "--quiet", "--json", str(path)]
        command += ["--repetitions", str(options.repetitions), "--sizes", *map(str, options.sizes)]
        code = launch(command, size=options.np)
        if code == 0 and not options.quiet:
            print(bench.format_table(bench.load(path)))
        return code


def _run(options: argparse.Namespace) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        options.parser.error("name the command to run, for example: main.py")
    if options.min_np is not None and options.min_np > options.np:
        options.parser.error(f"--min-np {options.min_np} is more than -np {options.np}")
    if options.min_np is not None and not options.max_restarts:
        options.parser.error("--min-np takes effect at a restart: give --max-restarts as well")
    if options.restore_previous:  # where every rank looks for it
        os.environ["HOSTOPT_RESTORE_PREVIOUS"] = "true"
    try:
        return launch(
            command,
            size=options.np,
            evaluators=options.evaluators,
            max_restarts=options.max_restarts,
            min_size=options.min_np,
        )
    except FileNotFoundError as error:
        _complain(error)
        return _USAGE_ERROR
    except OSError as error:
        descriptors.check(error)
        raise ConfigError(
            f"not all tasks could be started: {error}. Start fewer, or raise the limit: see "
            "`ulimit -a`"
        ) from None


def _complain(error: Exception) -> None:
    output.ERR.write(f"hostopt: {error}\n".encode(errors="backslashreplace"))


def _whole(least: int, most: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not from {least} to {most}")
        return value

    return whole_number


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
