"""`hostopt run` and `hostopt exec`, which start a command on all ranks or as one of them."""

from __future__ import annotations

import argparse
import os
from typing import Any, NoReturn

from hostopt.adapters.discover import set_tf_config
from hostopt.cluster.cluster import Cluster
from hostopt.commands import arguments
from hostopt.errors import ConfigError
from hostopt.launch import output
from hostopt.launch.engine import Engine, LocalEngine
from hostopt.launch.environment import find_command, with_defaults
from hostopt.launch.launcher import RunOptions, launch
from hostopt.launch.task_group import start_error
from hostopt.options import YEAR_S, Options
from hostopt.process import descriptors

_PLACES_TIMEOUT_S = 60.0


def add(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    run = commands.add_parser(
        "run",
        help="start all processes of a cluster, on this machine or on a cluster of Ray",
        usage="hostopt run -np N [--evaluators K] [--data-workers K] "
        "[--max-restarts R [--min-np M]] "
        "[--restore-previous] [--autotune] [--bind-to WHAT] [--log-dir DIR] [--verbose] "
        "[--metrics-port PORT] "
        "[--on ray [--address HOST:PORT] [--resources R=N,...] [--places-timeout-s S]] [--] "
        "command [args ...]",
        description="Start one command as chief, workers, evaluators and data workers, each with "
        "its own TF_CONFIG, and end them together. A command that ends in .py is run with this "
        "Python. HOSTOPT_SLOT is set to the slot of the rank on this machine, 0 to N-1, which "
        "does not change when ranks are renumbered.",
        allow_abbrev=False,
    )
    arguments.add_size(run, "number of ranks: 1 chief, N-1 workers")
    arguments.add_count(run, "--evaluators", "number of evaluators")
    meaning = "number of processes that prepare the data of all ranks, instead of each its own"
    arguments.add_count(run, "--data-workers", meaning)
    meaning = "restart the ranks up to R times after a failure that may be temporary"
    arguments.add_number(run, "--max-restarts", "R", 0, arguments.MAX_TIMES, meaning, default=0)
    meaning = "restart without ranks that fail twice in a row, with at least M ranks (default: N)"
    arguments.add_number(run, "--min-np", "M", 1, arguments.MAX_TASKS, meaning)
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
        help="bind each rank to its share of the cores, or leave them to all (default: cores)",
    )
    run.add_argument(
        "--log-dir",
        metavar="DIR",
        help="directory for all output, a file for each task and attempt (default: a temporary "
        "one, which is removed if the run succeeds)",
    )
    run.add_argument(
        "--verbose", action="store_true", help="show all output, and no line of progress"
    )
    meaning = (
        "loopback port at which Prometheus can read metrics of the run, 0 for any free one; "
        "needs pip install 'hostopt[metrics]' (default: none)"
    )
    arguments.add_number(run, "--metrics-port", "PORT", 0, arguments.MAX_PORT, meaning)
    _add_engine_arguments(run)
    arguments.add_command(run, "the command that every process runs")
    run.set_defaults(run=_run, parser=run)


def _run(options: argparse.Namespace) -> int:
    command = arguments.command_of(options)
    if options.min_np is not None and options.min_np > options.np:
        options.parser.error(f"--min-np {options.min_np} is greater than -np {options.np}")
    if options.min_np is not None and not options.max_restarts:
        options.parser.error("--min-np needs --max-restarts: it takes effect at a restart")
    if options.data_workers and options.on != "local":
        options.parser.error(
            "--data-workers contradicts --on ray: data workers run on the machine of the launcher"
        )
    engine = _engine_of(options)
    if options.restore_previous:  # every rank inherits it
        os.environ["HOSTOPT_RESTORE_PREVIOUS"] = "true"
    if options.autotune:
        os.environ["HOSTOPT_AUTOTUNE"] = "true"
    try:
        run = RunOptions(
            size=options.np,
            evaluators=options.evaluators,
            data_workers=options.data_workers,
            max_restarts=options.max_restarts,
            min_size=options.min_np,
            log_dir=options.log_dir,
            verbose=options.verbose,
            metrics_port=options.metrics_port,
        )
        return launch(command, run, engine)
    except FileNotFoundError as error:
        output.print_error(error)
        return arguments.USAGE_ERROR
    except OSError as error:
        descriptors.check(error)  # has better advice if no descriptor is left
        raise start_error(error) from None


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on",
        choices=["local", "ray"],
        default="local",
        help="start the processes on this machine, or on the nodes of a cluster of Ray (default: "
        "local)",
    )
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="the cluster of Ray (default: auto, the one of this machine or job)",
    )
    parser.add_argument(
        "--resources",
        type=_resources,
        metavar="R=N,...",
        help="what Ray reserves for each rank, such as CPU=4,GPU=1 (default: CPU=1)",
    )
    parser.add_argument(
        "--places-timeout-s",
        type=_seconds,
        metavar="S",
        help="how long to wait for nodes of Ray with room, before fewer ranks start, as "
        f"--min-np allows (default: {_PLACES_TIMEOUT_S:g})",
    )


def _engine_of(options: argparse.Namespace) -> Engine:
    if options.on == "local":
        for name in ("address", "resources", "places_timeout_s"):
            if getattr(options, name) is not None:
                options.parser.error(f"--{name.replace('_', '-')} needs --on ray")
        return LocalEngine(binds=options.bind_to != "none")
    if options.bind_to == "cores":
        options.parser.error(
            "--bind-to cores contradicts --on ray: Ray reserves cores by their number, with "
            "--resources CPU=N"
        )
    from hostopt.launch.ray_engine import RayEngine

    timeout_s = options.places_timeout_s
    return RayEngine(
        options.address or "auto",
        options.resources or {"CPU": 1.0},
        _PLACES_TIMEOUT_S if timeout_s is None else timeout_s,
    )


def _resources(text: str) -> dict[str, float]:
    resources = {}
    for part in text.split(","):
        name, _, amount = part.partition("=")
        try:
            value = float(amount)
        except ValueError:
            value = 0.0
        if not name.strip() or not (0 < value < 1 or (value >= 1 and value.is_integer())):
            raise argparse.ArgumentTypeError(
                f"{part!r} is not NAME=NUMBER with a whole number, or one between 0 and 1"
            )
        resources[name.strip()] = value
    return resources


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= YEAR_S:
        raise argparse.ArgumentTypeError(f"{seconds:g} is not above 0 and up to {YEAR_S:g}")
    return seconds


def add_exec(commands: Any) -> None:
    """Adds `hostopt exec` to a parser's commands."""
    parser = commands.add_parser(
        "exec",
        help="run a command as one process of a cluster that another launcher has started",
        usage="hostopt exec [--evaluators K] [--] command [args ...]",
        description="Find the cluster in the environment that mpirun, srun, Kubernetes or another "
        "launcher has made, set TF_CONFIG, and run the command in this process. A command that "
        "ends in .py is run with this Python.",
        allow_abbrev=False,
    )
    meaning = "number of processes, the last ones, that are evaluators"
    arguments.add_count(parser, "--evaluators", meaning)
    arguments.add_command(parser, "the command to run")
    parser.set_defaults(run=_exec, parser=parser)


def _exec(options: argparse.Namespace) -> int:
    try:
        _become(find_command(arguments.command_of(options)), options.evaluators)
    except OSError as error:
        output.print_error(error)
        return arguments.USAGE_ERROR


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
