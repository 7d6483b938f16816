"""`hostopt doctor`: runs all checks in order."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from typing import Any

from hostopt.cluster.cluster import Cluster
from hostopt.cluster.tf_config import EVALUATOR
from hostopt.commands.arguments import add_number
from hostopt.doctor import machine, network
from hostopt.doctor.checking import WRONG, Finding, note, outcomes, run, wrong
from hostopt.errors import ConfigError, HostOptError
from hostopt.options import MIN_TIMEOUT_S, YEAR_S, Options

_CHECK_TIMEOUT_S = 10.0
_SPEED_TIMEOUT_S = 90.0  # starts TensorFlow if there is a GPU
_CONNECTED_TIMEOUT_S = 30.0  # for the checks between connected ranks


def add(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine and the cluster",
        description="Check this machine and, if TF_CONFIG names a cluster, this task in it. "
        "Start it on all ranks at the same time, with the TF_CONFIG and the HOSTOPT_* "
        "variables of the training, and the ranks also check their clocks, versions and "
        "links. Exits with 78 if anything is WRONG.",
        allow_abbrev=False,
    )
    parser.add_argument("--model-dir", metavar="DIR", help="model_dir of the training")
    meaning = "seconds to wait for the other ranks"
    add_number(parser, "--timeout-s", "S", MIN_TIMEOUT_S, YEAR_S, meaning, default=10.0)
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    healthy = True
    for finding in examine(os.environ, options.model_dir, options.timeout_s):
        print(finding, flush=True)
        healthy = healthy and finding.verdict != WRONG
    return 0 if healthy else ConfigError.exit_code


def examine(
    environ: Mapping[str, str], model_dir: str | None, timeout_s: float
) -> Iterator[Finding]:
    """Checks this machine and, if TF_CONFIG names a cluster, this task in it."""
    checks: list[tuple[Any, ...]] = [
        (machine.versions,),
        (machine.keras, environ),
        (machine.variables, environ),
        (machine.proxies, environ),
        (machine.shared_memory,),
        (machine.open_files,),
        (machine.model_dir, model_dir),
    ]
    for check, *arguments in checks:
        yield from run(check, *arguments, timeout_s=_CHECK_TIMEOUT_S)
    (outcome,) = outcomes(_clusters, [environ], _CHECK_TIMEOUT_S)
    if isinstance(outcome, Exception):
        is_ours = isinstance(outcome, HostOptError)
        text = str(outcome) if is_ours else f"TF_CONFIG cannot be used: {outcome!r}"
        yield wrong(text)
        return
    cluster, ring = outcome
    yield from run(network.task, cluster, timeout_s=_CHECK_TIMEOUT_S)
    if ring is not None:
        yield from _examine_ring(ring, environ, model_dir, timeout_s)
    if cluster.rank is None or cluster.rank == cluster.local_ranks[0]:  # one for each host
        yield from run(machine.speeds, timeout_s=_SPEED_TIMEOUT_S)  # last, as it takes longest


def _clusters(environ: Mapping[str, str]) -> tuple[Cluster, Cluster | None]:
    """Returns the cluster, and the ring that this task connects to; None if it is alone."""
    cluster = Cluster.from_tf_config(environ)
    if cluster.rank is not None:
        return cluster, cluster if cluster.size > 1 else None
    among_several = cluster.role == EVALUATOR and len(cluster.evaluators) > 1
    return cluster, cluster.evaluator_ring() if among_several else None


def _examine_ring(
    ring: Cluster, environ: Mapping[str, str], model_dir: str | None, timeout_s: float
) -> Iterator[Finding]:
    try:
        options = Options().with_environment(environ)
    except ConfigError:  # `machine.variables` has reported it
        options = None
    healthy = options is not None
    checks: list[tuple[Any, ...]] = [(network.names, ring), (network.local_address, ring.task)]
    if options is not None:
        checks.append((network.security, ring, options, environ))
    for check, *arguments in checks:
        findings = run(check, *arguments, timeout_s=_CHECK_TIMEOUT_S)
        healthy = healthy and not any(finding.verdict == WRONG for finding in findings)
        yield from findings
    if not healthy:
        yield note("skipped the checks between ranks: correct what is WRONG here first")
        return
    most_s = 2 * timeout_s + _CONNECTED_TIMEOUT_S
    yield from run(network.other_ranks, ring, options, model_dir, timeout_s, timeout_s=most_s)
