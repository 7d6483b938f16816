"""Arguments of `hostopt run` about the machines on which it starts tasks."""

from __future__ import annotations

import argparse

from hostopt.launch.engine import Engine
from hostopt.launch.local_engine import LocalEngine

_MAX_S = 365 * 24 * 3600.0
_PLACES_TIMEOUT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to a parser."""
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


def engine_of(options: argparse.Namespace) -> Engine:
    """Returns the engine that starts the tasks.

    Raises:
      SystemExit: arguments contradict each other.
    """
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
    return _ray_engine(options)


def _ray_engine(options: argparse.Namespace) -> Engine:
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
            resources[name.strip()] = float(amount)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=NUMBER") from None
        value = resources[name.strip()]
        if not name.strip() or not (0 < value < 1 or (value >= 1 and value.is_integer())):
            raise argparse.ArgumentTypeError(
                f"{part!r} is not NAME=NUMBER with a whole number, or one between 0 and 1"
            )
    return resources


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= _MAX_S:
        raise argparse.ArgumentTypeError(f"{seconds:g} is not above 0 and up to {_MAX_S:g}")
    return seconds
