"""All checks, in the order in which they are run and shown.

To add one, write a function that yields findings beside those of its kind, and name it here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hostopt.cluster import Cluster
from hostopt.doctor import machine, meeting, network, software
from hostopt.doctor.checking import NOTE, WRONG, Finding, outcomes, run
from hostopt.errors import ConfigError, HostOptError
from hostopt.options import Options

__all__: list[str] = []

_CHECK_TIMEOUT_S = 10.0
_TOGETHER_TIMEOUT_S = 30.0  # of ranks that have met


def examine(
    environ: Mapping[str, str], model_dir: str | None, timeout_s: float
) -> Iterator[Finding]:
    """Check this machine and, where TF_CONFIG names a cluster, this task's place in it.

    Args:
      environ: the environment of the training.
      model_dir: where it writes; None where that was not said.
      timeout_s: how long to wait for the doctors of the other ranks.

    Yields:
      What was found, as soon as it is.
    """
    checks: list[tuple[Any, ...]] = [
        (software.versions,),
        (software.keras, environ),
        (software.variables, environ),
        (software.proxies, environ),
        (machine.shared_memory,),
        (machine.open_files,),
        (machine.model_dir, model_dir),
    ]
    for check, *arguments in checks:
        yield from run(check, *arguments, timeout_s=_CHECK_TIMEOUT_S)
    (found,) = outcomes(_clusters, [environ], _CHECK_TIMEOUT_S)
    if isinstance(found, Exception):
        known = isinstance(found, HostOptError)
        yield Finding(WRONG, str(found) if known else f"TF_CONFIG cannot be used: {found!r}")
        return
    cluster, ring = found
    yield from run(network.task, cluster, timeout_s=_CHECK_TIMEOUT_S)
    if ring is not None:
        yield from _examine_ring(ring, environ, model_dir, timeout_s)


def _clusters(environ: Mapping[str, str]) -> tuple[Cluster, Cluster | None]:
    """All tasks, and those among which this one reduces or evaluates; None where it is alone."""
    cluster = Cluster.from_tf_config(environ)
    if cluster.rank is not None:
        return cluster, cluster if cluster.size > 1 else None
    among_several = len(cluster.evaluators) > 1
    return cluster, cluster.evaluator_ring() if among_several else None


def _examine_ring(
    ring: Cluster, environ: Mapping[str, str], model_dir: str | None, timeout_s: float
) -> Iterator[Finding]:
    try:
        options = Options().with_environment(environ)
    except ConfigError:  # `software.variables` has said so
        options = None
    healthy = options is not None
    checks: list[tuple[Any, ...]] = [
        (network.names, ring),
        (network.own_address, ring.task),
    ]
    if options is not None:
        checks.append((network.security, ring, options, environ))
    for check, *arguments in checks:
        found = run(check, *arguments, timeout_s=_CHECK_TIMEOUT_S)
        healthy = healthy and not any(finding.verdict == WRONG for finding in found)
        yield from found
    if not healthy:
        yield Finding(NOTE, "skipped to meet the other ranks: correct what is wrong here first")
        return
    yield from run(
        meeting.other_ranks,
        ring,
        options,
        model_dir,
        timeout_s,
        timeout_s=2 * timeout_s + _TOGETHER_TIMEOUT_S,
    )
