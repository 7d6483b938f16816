"""The command ``hostopt``."""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Sequence

from hostopt.errors import HostOptError
from hostopt.launch import launch

__all__: list[str] = []

_USAGE_ERROR = 2


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
    options = _parser().parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="hostopt: %(message)s")
    try:
        return int(options.run(options))
    except HostOptError as error:
        print(f"hostopt: {error}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hostopt", description="Host-offload training over gRPC.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"hostopt {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    run = commands.add_parser(
        "run",
        help="start all processes of a cluster on this machine",
        usage="hostopt run -np N [--evaluators K] [--] command [args ...]",
        description="Start one command as chief, workers and evaluators, each with its own "
        "TF_CONFIG, and end them together. A command that ends in .py is run with this Python.",
        allow_abbrev=False,
    )
    run.add_argument(
        "-np", type=_at_least(1), required=True, metavar="N", help="ranks: 1 chief, N-1 workers"
    )
    run.add_argument(
        "--evaluators", type=_at_least(0), default=0, metavar="K", help="evaluators (default: 0)"
    )
    run.add_argument("command", nargs=argparse.REMAINDER, help="what every process runs")
    run.set_defaults(run=_run, parser=run)
    return parser


def _run(options: argparse.Namespace) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        options.parser.error("name the command to run, for example: main.py")
    try:
        return launch(command, size=options.np, evaluators=options.evaluators)
    except FileNotFoundError as error:
        print(f"hostopt: {error}", file=sys.stderr)
        return _USAGE_ERROR


def _at_least(minimum: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is less than {minimum}")
        return value

    return number


def _version() -> str:
    try:
        return importlib.metadata.version("hostopt")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
