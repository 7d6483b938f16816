"""`hostopt status`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from hostopt import lock_file
from hostopt.cluster.tf_config import is_address
from hostopt.commands.status_table import format_overview
from hostopt.errors import ConfigError, PeerLostError
from hostopt.options import Options
from hostopt.transport.addresses import is_loopback
from hostopt.transport.overview import printable


def add(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    parser = commands.add_parser(
        "status",
        help="show what each rank of a running training is doing",
        description="Ask a rank for the state of all ranks: their steps, which rank each waits "
        "for and since when, memory and versions. A ring with a token or certificates needs the "
        "same HOSTOPT_TOKEN_FILE, HOSTOPT_TOKEN or HOSTOPT_TLS_DIR. Exits with 200 if a rank "
        "does not answer.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "target",
        metavar="DIR|HOST:PORT",
        help="model_dir of a training that runs, or the address of any of its ranks",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_status)


def _status(options: argparse.Namespace) -> None:
    holder = None
    if os.path.isdir(options.target):
        holder = _holder_of(options.target)
        if not holder.ring:
            print(
                f"process {holder.pid} on host {printable(holder.host)} trains in "
                f"{options.target} since {printable(holder.start)}. It has no ring to ask"
            )
            return
    elif not is_address(options.target):
        raise ConfigError(
            f"{options.target!r} is neither a directory nor host:port. Give the model_dir of a "
            "training that runs, or the address of one of its ranks"
        )
    overview = _ask([options.target] if holder is None else holder.ring)
    print(json.dumps(overview, indent=1) if options.json else format_overview(overview))
    silent = [rank for rank, each in enumerate(overview["ranks"]) if isinstance(each, str)]
    if silent:
        raise PeerLostError(
            f"{len(silent)} of {len(overview['ranks'])} ranks do not answer, the first is rank "
            f"{silent[0]}. Check their processes, hosts and links"
        )


def _holder_of(directory: str) -> lock_file.Holder:
    """Returns the process that trains in a directory, which can be asked from here."""
    path = os.path.join(os.path.realpath(directory), lock_file.TRAINING)
    holder = lock_file.last_holder(path) if lock_file.is_held(path) else None
    if holder is None:
        raise ConfigError(
            f"no training has locked {directory}. Give the address of a rank if one runs: some "
            "file systems have no locks, and only Estimators lock their model_dir"
        )
    if holder.is_elsewhere and any(map(is_loopback, holder.ring)):
        raise ConfigError(
            f"process {holder.pid} on host {printable(holder.host)} trains in {directory}, and "
            "its ranks can be reached on that host only. Run this command there"
        )
    return holder


def _ask(addresses: Sequence[str]) -> dict[str, Any]:
    """Asks the ranks at some addresses in turn, until one of them answers."""
    from hostopt.transport.grpc.observer import observe  # it imports gRPC

    options = Options().with_environment()
    for address in addresses[:-1]:
        try:
            return observe(address, options)
        except PeerLostError:
            continue  # it may be the one that is frozen
    return observe(addresses[-1], options)
