"""`hostopt trace`."""

from __future__ import annotations

from typing import Any

from hostopt.commands.arguments import add_number
from hostopt.options import MAX_COUNT
from hostopt.telemetry.trace_files import draw, merge


def add(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    trace = commands.add_parser("trace", help="process trace files, which HOSTOPT_TIMELINE writes")
    commands = trace.add_subparsers(title="commands", metavar="command", required=True)
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
    meaning = "number of the step, from 0 (default: the last)"
    add_number(drawing, "--step", "N", 0, MAX_COUNT, meaning)
    drawing.set_defaults(run=lambda options: draw(options.file, options.output, options.step))
