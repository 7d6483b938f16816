"""`hostopt status`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hostopt import lock_file
from hostopt.cluster.tf_config import is_address
from hostopt.errors import ConfigError, PeerLostError
from hostopt.options import Options
from hostopt.transport.addresses import is_loopback
from hostopt.transport.overview import Details, awaits, find_blamed, is_send, printable

_HEADER = ("rank", "task", "address", "step", "memory", "hostopt", "TensorFlow", "Python", "state")
_UNKNOWN = "-"


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
        with contextlib.suppress(PeerLostError):  # it may be the one that is frozen
            return observe(address, options)
    return observe(addresses[-1], options)


def format_overview(overview: Mapping[str, Any]) -> str:
    """Returns a row for each rank, and a line for each rank that others wait for.

    Texts come from other processes: characters that could control a terminal are replaced.
    """
    ring, ranks = overview["ring"], overview["ranks"]
    rows: list[Sequence[str]] = [_HEADER]
    rows += [_row(rank, *each) for rank, each in enumerate(zip(ring, ranks))]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    for blamed, waiting in find_blamed(ranks).items():
        is_all = len(waiting) == len(ranks) - 1
        wait = "waits" if len(waiting) == 1 else "wait"
        who = "all others wait" if is_all else f"{_names(waiting)} {wait}"
        task, address = (printable(ring[blamed][key]) for key in ("task", "address"))
        name = f"rank {blamed} ({task}, {address})"
        lines.append(f"{who} for {name}, which {_reason(ranks[blamed])}")
    return "\n".join(lines)


def _row(rank: int, task: Mapping[str, str], details: Details | str) -> Sequence[str]:
    name = (str(rank), printable(task["task"]), printable(task["address"]))
    if isinstance(details, str):
        return (*name, *[_UNKNOWN] * 5, printable(details))
    versions = [details["versions"][key] for key in ("hostopt", "tensorflow", "python")]
    shown = [printable(version or _UNKNOWN) for version in versions]
    nbytes = details["memory_bytes"]
    memory = _UNKNOWN if nbytes is None else f"{nbytes / (1 << 20):.0f} MiB"
    return (*name, _step(details), memory, *shown, _state(details))


def _step(details: Details) -> str:
    if details["step"] is not None:
        return str(details["step"])
    last = details["last"]
    return f"call {last['step']}" if last else _UNKNOWN


def _state(details: Details) -> str:
    wait, send = details["wait"], details["send"]
    if details["error"]:
        return f"aborted: {printable(details['error'])}"
    if details["missing"]:
        return f"waits for {_names(details['missing'])} to connect"
    if wait and (not send or wait["for_s"] >= send["for_s"]):
        name = printable(wait["what"]) or "data"
        return f"has waited {wait['for_s']:.1f} s for rank {wait['peer']}: {name}"
    if send:
        return f"rank {send['peer']} has taken no data for {send['for_s']:.1f} s"
    return _idle(details)


def _idle(details: Details) -> str:
    last = details["last"]
    if last is None:
        return "in no collective so far"
    return f"in no collective for {last['ago_s']:.1f} s, after {printable(last['what']) or 'one'}"


def _reason(details: Details | str) -> str:
    """Describes what a rank is doing that others wait for, as the end of a sentence."""
    if isinstance(details, str):
        return "does not answer: it is frozen, cannot run Python, or is gone"
    wait = awaits(details)
    if wait is not None and is_send(wait):
        return f"sends to rank {wait['peer']}: the link between them is slow"
    if wait is not None:
        return f"waits for rank {wait['peer']}: they wait for each other"
    return f"is {_idle(details)}" if not details["wait"] else _state(details)


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks))
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
