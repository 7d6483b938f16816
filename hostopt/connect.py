"""From a cluster to a communicator, and what happens to the ring when the program fails."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from types import TracebackType

from hostopt import descriptors
from hostopt.clock import measure_offset
from hostopt.cluster import Cluster
from hostopt.communicator import BLOCK_BYTES, Communicator
from hostopt.error_report import shown_of, tell_launcher, write_details
from hostopt.errors import HostOptError, ResourceError
from hostopt.hierarchy import find_hosts, open_hierarchy
from hostopt.hosts import own_host_id
from hostopt.options import Options
from hostopt.output import open_closed_descriptors
from hostopt.timeline import Timeline
from hostopt.transport.base import Transport
from hostopt.transport.inproc import InprocTransport

__all__: list[str] = []

# Communicators whose peers must hear of an exception that ends this program.
_connected: weakref.WeakSet[Communicator] = weakref.WeakSet()


def connect(cluster: Cluster | None = None, options: Options | None = None) -> Communicator:
    """Meet the other ranks.

    This chains `sys.excepthook`: an exception that ends the program is printed and told to the
    other ranks, and the exit code is that of the error. If there is a directory for debugging, all
    of its tracebacks go to a file there, and what is printed is shorter.

    This raises the soft limit of open files to the hard one, too.

    Args:
      cluster: the ring; from TF_CONFIG by default.
      options: deadlines and sizes; HOSTOPT_* variables override them.

    Returns:
      This rank's communicator; of one rank where there is no cluster.

    Raises:
      ConfigError: TF_CONFIG, an option, this task's address or the timeline's file cannot be used.
      RendezvousTimeoutError: a rank did not appear in time.
    """
    exit_with_error_code()
    cluster = cluster or Cluster.from_tf_config()
    return meet(cluster, (options or Options()).with_environment())


def meet(cluster: Cluster, options: Options, service: str = "hostopt.Ring") -> Communicator:
    """`connect` with these options, whatever the environment says.

    Args:
      cluster: the ring.
      options: deadlines and sizes.
      service: name under which the ranks call each other; those of another one never meet.

    Returns:
      This rank's communicator.

    Raises:
      ConfigError: this task's address or the timeline's file cannot be used.
      RendezvousTimeoutError: a rank did not appear in time.
    """
    open_closed_descriptors()
    descriptors.raise_limit()
    communicator = Communicator(_transport(cluster, options, service))
    _connected.add(communicator)
    try:
        if options.timeline is not None:
            _start_timeline(communicator, options.timeline)
        hosts = find_hosts(communicator, own_host_id())
        # tried once now, so that an error comes at once and not in the middle of a step
        if hosts is None or open_hierarchy(communicator, hosts, BLOCK_BYTES) is None:
            return communicator
    except BaseException as error:
        communicator.abort(error)
        communicator.close()
        raise
    transport = communicator.transport
    communicator = Communicator(transport, transport.open_channel("all ranks"), hosts=hosts)
    _connected.add(communicator)
    return communicator


def _transport(cluster: Cluster, options: Options, service: str) -> Transport:
    if cluster.size == 1:
        return InprocTransport.connect(1, options)[0]
    from hostopt.transport.grpc import GrpcTransport

    return GrpcTransport(cluster, options, service)


def _start_timeline(communicator: Communicator, path: str) -> None:
    timeline = Timeline(path, communicator.transport.cluster)
    communicator.transport.timeline = timeline
    timeline.clock_offset_s = measure_offset(communicator.duplicate("the clocks")).offset_s


_OF_PYTHON = 1  # exit code of any exception
_previous_hooks: list[Callable[..., object]] = []


def exit_with_error_code() -> None:
    """Chain `sys.excepthook`, once: a HostOptError that ends the program gives its code."""
    if not _previous_hooks:
        _previous_hooks.append(sys.excepthook)
        sys.excepthook = _report_and_exit


def _report(error: BaseException) -> bool:
    """Print an error in short, if all of it can be written to a file; tell the launcher."""
    if not isinstance(error, Exception):
        return False
    transport = next((c.transport for c in list(_connected) if c.size > 1), None)
    directory = transport.recorder.directory if transport else None
    path = None
    if transport and directory and _previous_hooks[0] is sys.__excepthook__:
        path = write_details(directory, transport.rank, error)
    tell_launcher(error, _exit_code_of(error), path)
    if transport is None or path is None:
        return False
    who = f"rank {transport.rank} ({transport.cluster.task})"
    sys.stderr.write(shown_of(error, who, path))
    sys.stderr.flush()
    return True


def _exit_code_of(error: BaseException) -> int:
    if descriptors.is_out(error):
        return ResourceError.exit_code
    return error.exit_code if isinstance(error, HostOptError) else _OF_PYTHON


def _report_and_exit(
    type_: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    try:
        if not _report(error):
            _previous_hooks[0](type_, error, traceback)
    finally:
        for communicator in list(_connected):
            communicator.abort(error)
    code = _exit_code_of(error)
    if code != _OF_PYTHON:
        # an excepthook cannot choose the exit code otherwise; do what a normal exit would do
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
