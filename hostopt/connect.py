"""Connection to the other ranks, and abort of the ring if the program fails."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from hostopt.adapters import launchers
from hostopt.adapters.discover import set_tf_config
from hostopt.cluster.cluster import Cluster
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.host_memory import BLOCK_BYTES, HostMemory, find_hosts
from hostopt.collectives.hosts import local_host_id
from hostopt.collectives.mpi import runtime
from hostopt.collectives.mpi.group import open_world
from hostopt.errors import ConfigError, HostOptError, ResourceError
from hostopt.measure.clock import measure_offset
from hostopt.measure.tuning import fastest, format_variables, tune
from hostopt.options import Options
from hostopt.process import descriptors
from hostopt.process.child_process import ForkGuard, call_on_error, native_threads
from hostopt.process.error_report import summary_of, write_details, write_report
from hostopt.telemetry.timeline import Timeline
from hostopt.transport import event_loop
from hostopt.transport.base import Transport
from hostopt.transport.inproc import InprocTransport

# Communicators whose rings an exception that ends this program must abort.
_connected: weakref.WeakSet[Communicator] = weakref.WeakSet()
_grpc_guard = ForkGuard("gRPC", lambda: "grpc_global_tim" in native_threads())  # name of its timer


def connect(cluster: Cluster | None = None, options: Options | None = None) -> Communicator:
    """Connects to the other ranks.

    This chains `sys.excepthook`: an exception that ends the program aborts the ring on all
    ranks, and the process exits with the code of the error. If the option `debug_dir` is set, the
    full traceback is written to a file there, and a shorter one is printed.

    If the option `autotune` is set, the ranks first choose other options by trial.

    This also raises the soft limit of open files to the hard limit.

    Collective: all ranks must call it.

    Args:
      cluster: the cluster; by default from TF_CONFIG, or from the launcher that started this
        process.
      options: the options; HOSTOPT_* variables override them.

    Returns:
      The communicator of this rank. Without a cluster it has one rank.

    Raises:
      ConfigError: TF_CONFIG, an option, this task's address or the timeline's file cannot be used,
        or this process was forked from one that had used gRPC or a ring.
      RendezvousTimeoutError: a rank did not start in time.
    """
    event_loop.guard.check()
    _grpc_guard.check()
    exit_with_error_code()
    options = (options or Options()).with_environment()
    if cluster is None:
        set_tf_config(options)
        cluster = Cluster.from_tf_config()
    if options.autotune and cluster.size > 1:
        best = fastest(tune(functools.partial(connect_ring, cluster), options))
        if cluster.rank == 0:
            text = "autotune has chosen options by trial. Set them to keep this choice"
            sys.stderr.write(f"hostopt: {text}: {format_variables(best)}\n")
        options = best.applied_to(options)
    return connect_ring(cluster, options)


def connect_ring(
    cluster: Cluster, options: Options, service: str = "hostopt.Ring"
) -> Communicator:
    """Connects to the other ranks with these options; the environment does not override them.

    Collective: all ranks must call it.

    Args:
      service: name of the gRPC service. Ranks with different names do not connect.
    """
    descriptors.open_closed_descriptors()
    descriptors.raise_limit()
    call_on_error(_abort_all)
    uses_mpi = options.communication == "mpi" and cluster.size > 1
    if uses_mpi:
        _prepare_mpi(options)
    communicator = Communicator(_transport(cluster, options, service))
    _connected.add(communicator)
    try:
        if options.timeline is not None:
            timeline = Timeline(options.timeline, communicator.transport.cluster)
            communicator.transport.timeline = timeline
            timeline.clock_offset_s = measure_offset(communicator.duplicate("the clocks")).offset_s
        hosts, world = None, None
        if uses_mpi:
            world = open_world(communicator)
        else:
            hosts = find_hosts(communicator, local_host_id())
            # tried now, so that an error is raised here and not in the middle of a step
            if hosts is None or not HostMemory(communicator, hosts).hierarchical(BLOCK_BYTES):
                return communicator
    except BaseException as error:
        communicator.abort(error)
        communicator.close()
        raise
    transport = communicator.transport
    channel = transport.open_channel("all ranks")
    communicator = Communicator(transport, channel, hosts=hosts, world=world)
    _connected.add(communicator)
    return communicator


def _prepare_mpi(options: Options) -> None:
    launchers.check_started(os.environ)
    if options.tls_dir is not None and not options.insecure:
        raise ConfigError(
            "tls_dir is set, but with communication='mpi' the data travel through MPI, which "
            "hostopt cannot encrypt. Set insecure=True to accept this, or use 'grpc+tcp'"
        )
    runtime.prepare(options)


def start_beside_ring(cluster: Cluster, options: Options) -> None:
    """Starts what the ranks need of a process that is not one of them, such as an evaluator.

    MPI starts and ends only if all processes of its launcher take part. This does not wait for
    them.
    """
    if options.communication == "mpi" and cluster.size > 1 and launchers.is_started(os.environ):
        runtime.take_part(options)


def _transport(cluster: Cluster, options: Options, service: str) -> Transport:
    if cluster.size == 1:
        return InprocTransport.connect(1, options)[0]
    from hostopt.transport.grpc.transport import GrpcTransport

    return GrpcTransport(cluster, options, service)


_DEFAULT_EXIT_CODE = 1  # of Python, after any exception
_previous_hooks: list[Callable[..., object]] = []


def exit_with_error_code() -> None:
    """Chains `sys.excepthook`, once: a HostOptError that ends the program sets the exit code."""
    if not _previous_hooks:
        _previous_hooks.append(sys.excepthook)
        sys.excepthook = _report_and_exit


def _abort_all(error: BaseException) -> None:
    for communicator in list(_connected):
        communicator.abort(error)


def _report(error: BaseException) -> bool:
    """Writes the error to a file and prints a summary; returns False if nothing was printed.

    A report for the launcher is written in both cases.
    """
    if not isinstance(error, Exception):
        return False
    transport = next((c.transport for c in list(_connected) if c.size > 1), None)
    directory = transport.recorder.directory if transport else None
    path = None
    if transport and directory and _previous_hooks[0] is sys.__excepthook__:
        path = write_details(directory, transport.rank, error)
    write_report(error, _exit_code_of(error), path)
    if transport is None or path is None:
        return False
    sys.stderr.write(summary_of(error, transport.cluster.describe(transport.rank), path))
    sys.stderr.flush()
    return True


def _exit_code_of(error: BaseException) -> int:
    if descriptors.is_out(error):
        return ResourceError.exit_code
    return error.exit_code if isinstance(error, HostOptError) else _DEFAULT_EXIT_CODE


def original_of(error: BaseException) -> BaseException:
    """Returns the HostOptError that TensorFlow or Keras turned into an error of its own.

    Its text contains the message of the original, which is in the chain of the error if a function
    was traced, and has aborted the ring if a graph was executed.
    """
    if isinstance(error, HostOptError):
        return error
    causes: list[BaseException | None] = [each.transport.error for each in list(_connected)]
    link: BaseException | None = error
    while link is not None and link not in causes:
        causes.append(link)
        link = link.__cause__ or link.__context__
    text = " ".join(str(error).split())
    for cause in causes:
        if isinstance(cause, HostOptError) and " ".join(cause.message.split()) in text:
            return cause
    return error


def exit_in_one_line(error: HostOptError) -> NoReturn:
    """Ends the process with an error, without a traceback that would not help."""
    exit_with_error_code()
    try:
        if not _report(error):
            sys.stderr.write(f"hostopt: {error}\n")
    finally:
        _abort_all(error)
    raise SystemExit(error.exit_code)


def _report_and_exit(
    type_: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    original = original_of(error)
    if original is not error:
        original.__cause__ = error if original.__cause__ is None else original.__cause__
        type_, error, traceback = type(original), original, original.__traceback__
    try:
        if not _report(error):
            _previous_hooks[0](type_, error, traceback)
    finally:
        _abort_all(error)
    code = _exit_code_of(error)
    if code != _DEFAULT_EXIT_CODE:
        # an excepthook cannot set the exit code in another way; do what a normal exit does
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
