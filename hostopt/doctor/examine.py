"""All checks, in the order in which they are run and shown.

To add one, write a function that yields findings beside those of its kind, and name it here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hostopt.cluster import Cluster
from hostopt.doctor import machine, meeting, network, software
from hostopt.doctor.checking import NOTE, WRONG, Finding, outcomes, run
from hostopt.errors import ConfigError
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
    (cluster,) = outcomes(Cluster.from_tf_config, [environ], _CHECK_TIMEOUT_S)
    if isinstance(cluster, Exception):
        yield Finding(WRONG, str(cluster))
        return
    yield from run(network.place, cluster, timeout_s=_CHECK_TIMEOUT_S)
    ring = _ring_of(cluster)
    if ring is not None:
        yield from _examine_ring(ring, environ, model_dir, timeout_s)


def _ring_of(cluster: Cluster) -> Cluster | None:
    """The ranks that this task reduces with, or evaluates with; None where it does so alone."""
    if cluster.rank is None and cluster.task in cluster.evaluators:
        cluster = cluster.evaluator_ring()
    return cluster if cluster.rank is not None and cluster.size > 1 else None


def _examine_ring(
    ring: Cluster, environ: Mapping[str, str], model_dir: str | None, timeout_s: float
) -> Iterator[Finding]:
    try:
        options = Options().with_environment(environ)
    except ConfigError:  # `software.variables` has said so
        options = None
    healthy = options is not None
    for check, *arguments in [(network.names, ring), (network.own_address, ring.task)]:
        found = run(check, *arguments, timeout_s=_CHECK_TIMEOUT_S)
        healthy = healthy and not any(finding.verdict == WRONG for finding in found)
        yield from found
    if not healthy:
        yield Finding(NOTE, "skipped to meet the other ranks: correct what is wrong here first")
        return
    yield from run(
        meeting.together,
        ring,
        options,
        model_dir,
        timeout_s,
        timeout_s=2 * timeout_s + _TOGETHER_TIMEOUT_S,
    )
