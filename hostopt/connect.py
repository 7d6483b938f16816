"""From a cluster to a communicator, and what happens to the ring when the program fails."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from types import TracebackType

from hostopt.cluster import Cluster
from hostopt.communicator import Communicator
from hostopt.errors import HostOptError
from hostopt.options import Options
from hostopt.transport.inproc import InprocTransport

__all__: list[str] = []

# Communicators whose peers must hear of an exception that ends this program.
_connected: weakref.WeakSet[Communicator] = weakref.WeakSet()


def connect(cluster: Cluster | None = None, options: Options | None = None) -> Communicator:
    """Meet the other ranks.

    This chains `sys.excepthook`: an exception that ends the program is printed
    as before and told to the other ranks, and the exit code is that of the error.

    Args:
      cluster: the ring; from TF_CONFIG by default.
      options: deadlines and sizes; HOSTOPT_* variables override them.

    Returns:
      This rank's communicator; of one rank where there is no cluster.

    Raises:
      ConfigError: TF_CONFIG, an option or this task's address cannot be used.
      RendezvousTimeoutError: a rank did not appear in time.
    """
    exit_with_error_code()
    cluster = cluster or Cluster.from_tf_config()
    options = (options or Options()).with_environment()
    if cluster.size == 1:
        return Communicator(InprocTransport.connect(1, options)[0])
    from hostopt.transport.grpc import GrpcTransport

    communicator = Communicator(GrpcTransport(cluster, options))
    _connected.add(communicator)
    return communicator


_previous_hooks: list[Callable[..., object]] = []


def exit_with_error_code() -> None:
    """Chain `sys.excepthook`, once: a HostOptError that ends the program gives its code."""
    if not _previous_hooks:
        _previous_hooks.append(sys.excepthook)
        sys.excepthook = _report_and_exit


def _report_and_exit(
    type_: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    try:
        _previous_hooks[0](type_, error, traceback)
    finally:
        for communicator in list(_connected):
            communicator.abort(error)
    if isinstance(error, HostOptError):
        # an excepthook cannot choose the exit code otherwise; do what a normal exit would do
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code)
