"""Arguments that several commands have."""

from __future__ import annotations

import argparse
from collections.abc import Callable

MAX_TASKS = 1024
MAX_TIMES = 1_000_000
MAX_PORT = 65_535
USAGE_ERROR = 2


def number(least: float, most: float, kind: type[float] = int) -> Callable[[str], float]:
    """Returns the type of an argument that is a number from `least` to `most`."""

    def number(text: str) -> float:
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not from {least} to {most}")
        return value

    return number


def add_size(parser: argparse.ArgumentParser, meaning: str, required: bool = True) -> None:
    """Adds the argument -np."""
    parser.add_argument(
        "-np", type=number(1, MAX_TASKS), required=required, metavar="N", help=meaning
    )


def add_count(parser: argparse.ArgumentParser, name: str, meaning: str) -> None:
    """Adds an argument that is the number of tasks of a kind besides the ranks."""
    meaning = f"{meaning} (default: 0)"
    parser.add_argument(name, type=number(0, MAX_TASKS), default=0, metavar="K", help=meaning)


def add_command(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Adds the command at the end of the arguments, which `command_of` returns."""
    parser.add_argument("command", nargs=argparse.REMAINDER, help=meaning)


def command_of(options: argparse.Namespace) -> list[str]:
    """Returns the command at the end of the arguments."""
    command: list[str] = options.command
    command = command[1:] if command[:1] == ["--"] else command
    if not command:
        options.parser.error("no command to run: append one, for example main.py")
    return command
