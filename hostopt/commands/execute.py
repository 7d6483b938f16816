"""`hostopt exec`."""

from __future__ import annotations

import argparse
import os
from typing import Any, NoReturn

from hostopt.adapters.discover import set_tf_config
from hostopt.cluster.cluster import Cluster
from hostopt.commands.arguments import USAGE_ERROR, add_command, add_evaluators, command_of
from hostopt.errors import ConfigError
from hostopt.launch import output
from hostopt.launch.environment import find_command, with_defaults
from hostopt.options import Options


def add(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    parser = commands.add_parser(
        "exec",
        help="run a command as one process of a cluster that another launcher has started",
        usage="hostopt exec [--evaluators K] [--] command [args ...]",
        description="Find the cluster in the environment that mpirun, srun, Kubernetes or another "
        "launcher has made, set TF_CONFIG, and run the command in this process. A command that "
        "ends in .py is run with this Python.",
        allow_abbrev=False,
    )
    add_evaluators(parser, "number of processes, the last ones, that are evaluators")
    add_command(parser, "the command to run")
    parser.set_defaults(run=_exec, parser=parser)


def _exec(options: argparse.Namespace) -> int:
    try:
        _become(find_command(command_of(options)), options.evaluators)
    except OSError as error:
        output.print_error(error)
        return USAGE_ERROR


def _become(command: list[str], evaluators: int) -> NoReturn:
    """Replaces this process by the command, so that the launcher sees its exit code."""
    place = set_tf_config(Options().with_environment(), evaluators)
    cluster = Cluster.from_tf_config()
    if place is None and cluster.task is None:
        raise ConfigError(
            "there is neither TF_CONFIG nor a launcher that has started this process. Start "
            "this with mpirun, srun or another launcher, or use `hostopt run -np N`"
        )
    local_size = 1 if place is None or place.local_size is None else place.local_size
    if len(os.sched_getaffinity(0)) < (os.cpu_count() or 1):
        local_size = 1  # the launcher has bound this process to cores, so it may use all of them
    environment = with_defaults(os.environ, cluster.role, local_size)
    if place is not None and place.local_rank is not None:
        environment.setdefault("HOSTOPT_SLOT", str(place.local_rank))
    os.execvpe(command[0], command, environment)
