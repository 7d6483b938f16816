"""Arguments that several commands have."""

from __future__ import annotations

import argparse
from typing import Any

MAX_TASKS = 1024
MAX_TIMES = 1_000_000
MAX_PORT = 65_535
USAGE_ERROR = 2


def add_number(
    parser: argparse.ArgumentParser,
    name: str,
    metavar: str,
    least: float,
    most: float,
    meaning: str,
    **more: Any,
) -> None:
    """Adds an argument that is a number of the type of `least`, from `least` to `most`."""

    def number(text: str) -> float:
        value = type(least)(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not from {least} to {most}")
        return value

    if "default" in more:
        meaning = f"{meaning} (default: {more['default']:g})"
    parser.add_argument(name, type=number, metavar=metavar, help=meaning, **more)


def add_size(parser: argparse.ArgumentParser, meaning: str, required: bool = True) -> None:
    """Adds the argument -np."""
    add_number(parser, "-np", "N", 1, MAX_TASKS, meaning, required=required)


def add_count(parser: argparse.ArgumentParser, name: str, meaning: str) -> None:
    """Adds an argument that is the number of tasks of a kind besides the ranks."""
    add_number(parser, name, "K", 0, MAX_TASKS, meaning, default=0)


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
