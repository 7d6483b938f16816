"""`hostopt k8s`."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from hostopt.adapters.manifests import KINDS, Training, tfjob, to_json
from hostopt.commands.arguments import (
    MAX_TIMES,
    add_command,
    add_evaluators,
    add_size,
    command_of,
    integer,
)


def add(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    parser = commands.add_parser(
        "k8s",
        help="print manifests that train on Kubernetes",
        usage="hostopt k8s --image IMAGE -np N [--kind KIND] [--name NAME] [--evaluators K] "
        "[--max-restarts R] [--limit NAME=COUNT] [--volume CLAIM:PATH] [--] command [args ...]",
        description="Print the manifests of a training: an Indexed Job, a TFJob or a TrainJob, "
        "and a Secret with a new token. Give them to `kubectl apply -f -`.",
        allow_abbrev=False,
    )
    parser.add_argument("--image", required=True, help="image with hostopt and the program")
    add_size(parser, "number of ranks")
    parser.add_argument(
        "--kind", choices=list(KINDS), default="job", help="kind of the training (default: job)"
    )
    parser.add_argument(
        "--name", type=_name, default="hostopt", help="name of the objects (default: hostopt)"
    )
    add_evaluators(parser, "number of evaluators")
    parser.add_argument(
        "--max-restarts",
        type=integer(0, MAX_TIMES),
        default=5,
        metavar="R",
        help="restarts of each pod after a failure that may be temporary; not limited in a TFJob "
        "(default: 5)",
    )
    parser.add_argument(
        "--limit",
        type=_pair("="),
        action="append",
        default=[],
        metavar="NAME=COUNT",
        help="resource of each pod, such as nvidia.com/gpu=1; may be repeated",
    )
    parser.add_argument(
        "--volume",
        type=_pair(":"),
        action="append",
        default=[],
        metavar="CLAIM:PATH",
        help="PersistentVolumeClaim that all pods mount, for model_dir; may be repeated",
    )
    add_command(parser, "the command of each pod")
    parser.set_defaults(run=_print, parser=parser)


def _print(options: argparse.Namespace) -> None:
    if KINDS[options.kind] is tfjob and options.evaluators > 1:
        options.parser.error(
            "a TFJob has at most one evaluator: use --evaluators 1, or another kind"
        )
    training = Training(
        options.name,
        options.image,
        command_of(options),
        options.np,
        options.evaluators,
        options.max_restarts,
        dict(options.limit),
        dict(options.volume),
    )
    sys.stdout.write(to_json(KINDS[options.kind](training)))


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a name for Kubernetes: use up to 42 lower-case letters, digits and -"
        )
    return text


def _pair(separator: str) -> Any:
    def pair(text: str) -> tuple[str, str]:
        name, found, value = text.partition(separator)
        if not (name and found and value):
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME{separator}VALUE")
        return name, value

    return pair
