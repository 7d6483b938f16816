"""`hostopt bench`."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hostopt.cluster.cluster import Cluster
from hostopt.commands.arguments import MAX_TIMES, add_number, add_size
from hostopt.connect import connect, connect_ring
from hostopt.errors import ConfigError
from hostopt.launch.launcher import RunOptions, launch
from hostopt.measure import bench, tuning
from hostopt.options import WIRE_FORMATS, Options

_SIZES = ("64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB")
_REPETITIONS = 7


def add(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    parser = commands.add_parser(
        "bench",
        help="time all-reduces",
        description="Time all-reduces of float32 over N ranks on this machine with -np, or "
        "otherwise over the cluster in TF_CONFIG: then start every rank with the same "
        "arguments. Rank 0 prints a table.",
        allow_abbrev=False,
    )
    add_size(parser, "number of ranks on this machine", required=False)
    parser.add_argument(
        "--sizes",
        type=_size,
        nargs="+",
        metavar="SIZE",
        help=f"sizes of the buffers (default: {' '.join(_SIZES)})",
    )
    meaning = f"number of runs; the table shows their median (default: {_REPETITIONS})"
    add_number(parser, "--repetitions", "K", 1, MAX_TIMES, meaning)
    parser.add_argument(
        "--communication",
        choices=["auto", "grpc+tcp", "grpc", "shm", "mpi"],
        help="transport between the ranks",
    )
    parser.add_argument(
        "--compression", choices=["none", *WIRE_FORMATS], help="wire format of the values"
    )
    parser.add_argument(
        "--suggest",
        action="store_true",
        help="try communications, segment and bucket sizes instead, and print the best ones",
    )
    meaning = "speed of a host's line in one direction, in Gbit/s: the table shows the share used"
    add_number(parser, "--line", "GBIT", 0.001, 1e5, meaning)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the times to FILE")
    parser.add_argument("--quiet", action="store_true", help="do not print the table")
    parser.set_defaults(run=_bench, parser=parser)


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
            bench.save(options.json, results)
        if not options.quiet:
            _print_results(options, results)
    return 0


def _bench_here(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as directory:
        path = options.json or Path(directory, "times.json")
        command = [sys.executable, "-m", "hostopt", "bench", "--quiet", "--json", str(path)]
        if options.suggest:
            command.append("--suggest")
        else:
            command += ["--repetitions", str(options.repetitions)]
            command += ["--sizes", *map(str, options.sizes)]
        code = launch(command, RunOptions(size=options.np))
        if code == 0 and not options.quiet:
            kind = tuning.Trial if options.suggest else bench.Timing
            _print_results(options, bench.load(path, kind))
        return code


def _print_results(options: argparse.Namespace, results: Sequence[Any]) -> None:
    if options.suggest:
        choice = tuning.format_variables(tuning.fastest(results))
        print(f"{tuning.format_table(results)}\n\n{choice}")
    else:
        print(bench.format_table(results, options.line))


def _size(text: str) -> int:
    try:
        return bench.parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
