"""The command ``hostopt``, also as ``python -m hostopt``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from hostopt.commands import bench, doctor, k8s, run, status, trace
from hostopt.errors import HostOptError
from hostopt.launch import output
from hostopt.process import descriptors
from hostopt.versions import VERSION


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, and returns its exit code.

    It is 0 on success, the code of the task or error that ended the run, or 2 if the command to
    run does not exist.
    """
    descriptors.open_closed_descriptors()
    options = _parser().parse_args(argv)
    format_ = "hostopt: %(message)s"
    logging.basicConfig(stream=output.LogStream(), level=logging.INFO, format=format_)
    try:
        return int(options.run(options) or 0)
    except HostOptError as error:
        output.print_error(error)
        return error.exit_code
    finally:
        output.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hostopt", description="Host-offload training on several hosts.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"hostopt {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    for add in (run.add, status.add, run.add_exec, k8s.add, trace.add, bench.add, doctor.add):
        add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
