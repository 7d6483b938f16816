"""MPI in this process: loaded at the first use, started and ended by one thread, and polled.

MPI_Init and MPI_Finalize return when all processes of the launcher have called them, and the same
thread must call both. So a daemon thread does, and others wait for it with a deadline. MPI makes
progress only while it is called, so a wait polls its request, and between polls the error of the
ring and the deadline.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import ctypes
import functools
import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from hostopt.collectives.call import Array, CollectiveCall
from hostopt.errors import ConfigError, HostOptError, PeerLostError
from hostopt.options import Options
from hostopt.transport.base import Transport

_log = logging.getLogger(__name__)

# Time of polling without sleep: a rank that sleeps wakes up late, and then the others wait for it.
_SPIN_S, _SPIN_S_PER_BYTE = 2e-3, 5e-9
_POLLS = 16  # about 5 us, between offers of the core to other threads
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 200e-6
# Time in which the call of a rank arrives that has left since.
_GRACE_S, _GRACE_S_PER_BYTE = 1.0, 1e-8
_CAUSE_S = 2.0  # time in which the ring notices why MPI has failed
_kept: list[object] = []  # requests that have not ended, with their buffers: MPI may write to them


@functools.cache
def load() -> Any:
    """Imports mpi4py, which loads the MPI library, without starting MPI."""
    if "mpi4py.MPI" not in sys.modules:  # else the program has started MPI, and will end it
        try:
            import mpi4py
        except ImportError as error:
            raise ConfigError(
                "communication is 'mpi', but mpi4py is not installed. Run `pip install "
                "'hostopt[mpi]'` on all ranks"
            ) from error
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = "; ".join(str(error).splitlines())
        raise ConfigError(
            f"communication is 'mpi', but mpi4py cannot load the MPI library: {reason}. Put the "
            "directory of libmpi.so that belongs to your mpirun into LD_LIBRARY_PATH"
        ) from error
    return MPI


def _call_library(name: str, *arguments: Any) -> None:
    """Calls a function of MPI without the interpreter lock, which mpi4py holds in these calls.

    Otherwise no deadline could end a wait for the other processes.
    """
    code = getattr(ctypes.CDLL(load().__file__), name)(*arguments)
    if code:
        raise ConfigError(
            f"{name} has failed with code {code}. Check the messages of MPI above, and whether "
            "mpi4py uses the MPI library of the mpirun that has started this process"
        )


class Runtime:
    """The thread that starts and ends MPI."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]]]
        self._calls = queue.SimpleQueue()
        self.pid = os.getpid()  # a forked child does not have this thread
        self.is_ours = False  # True once this thread has started MPI, and so has to end it
        self.has_failed = False  # a ring was aborted: the others may never call MPI_Finalize
        self.end_timeout_s = 0.0  # in MPI_Finalize
        threading.Thread(target=self._run, daemon=True, name="hostopt-mpi").start()

    def call(self, function: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        """Calls a function on the thread, after those before it."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._calls.put((future, function))
        return future

    def start(self) -> None:
        """Starts MPI, unless it has been started; runs on the thread."""
        mpi = load()
        if mpi.Is_finalized():
            raise ConfigError(
                "communication is 'mpi', but this process has ended MPI already, and MPI cannot "
                "start again. Connect before MPI_Finalize"
            )
        if not mpi.Is_initialized():
            required, provided = ctypes.c_int(mpi.THREAD_MULTIPLE), ctypes.c_int()
            _call_library("MPI_Init_thread", None, None, required, ctypes.byref(provided))
            self.is_ours = True
        if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
            raise ConfigError(
                f"this MPI ({library_version()}) does not support MPI_THREAD_MULTIPLE, calls from "
                "several threads. Use an MPI that does, or another communication"
            )

    def _run(self) -> None:
        while True:
            future, function = self._calls.get()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)


def prepare(options: Options) -> Runtime:
    """Loads MPI, and makes this process end it at exit, with the option `evaluator_timeout_s`.

    Call this before the ring is connected: what is registered first at exit runs last, so the
    other ranks know that this one has left when it waits in MPI_Finalize.
    """
    load()
    runtime = _only_runtime()
    runtime.end_timeout_s = options.evaluator_timeout_s
    return runtime


@functools.cache
def _only_runtime() -> Runtime:
    runtime = Runtime()
    atexit.register(_end, runtime)
    return runtime


def take_part(options: Options) -> None:
    """Starts MPI in the background, for a process that is not part of the ring."""
    runtime = prepare(options)
    runtime.call(runtime.start)


def library_version() -> str:
    """Returns the name and version of the MPI library."""
    lines = str(load().Get_library_version()).splitlines()
    return " ".join(lines[0].replace("\0", "").split(",")[0].split())


def _end(runtime: Runtime) -> None:
    """Ends MPI at exit, if all collectives of this process have ended well."""
    if not runtime.is_ours or runtime.pid != os.getpid() or runtime.has_failed or _kept:
        return
    try:
        runtime.call(lambda: _call_library("MPI_Finalize")).result(runtime.end_timeout_s)
    except concurrent.futures.TimeoutError:
        _log.warning(
            "MPI_Finalize has waited %g s for other processes of the launcher: this process ends "
            "without it. Check what the others are doing, or raise evaluator_timeout_s",
            runtime.end_timeout_s,
        )


def wait(
    transport: Transport,
    call: CollectiveCall,
    request: Any,
    phase: str,
    *buffers: Array,
    have_all_called: bool = True,
) -> None:
    """Waits until a request has ended; keeps the `buffers` that it uses if the wait fails.

    If all ranks wait, each is reported to wait for the previous one. So the rank at the end of
    that chain is the one that has not called. If `have_all_called`, one that has left the ring has
    ended its part, as MPI and the messages of the ring do not wait for each other.
    """
    mpi = load()
    nbytes = sum(each.nbytes for each in buffers)
    grace_s = math.inf if have_all_called else _GRACE_S + nbytes * _GRACE_S_PER_BYTE
    try:
        if not (_has_ended(request) or _spin(request, nbytes)):
            previous, tag = (transport.rank - 1) % transport.size, call.tag()
            name, sleep = call.in_phase(phase), _growing_sleep()
            transport.mailbox.poll(previous, tag, name, request.Test, sleep, grace_s)
    except BaseException as error:
        _kept.append((request, *buffers))  # and this process does not end MPI
        failure = _cause(transport, call, error) if isinstance(error, mpi.Exception) else error
        transport.abort(failure)
        if failure is error:
            raise
        raise failure from error


def _has_ended(request: Any) -> bool:
    return any(request.Test() for _ in range(_POLLS))


def _spin(request: Any, nbytes: int) -> bool:
    end_s = time.monotonic() + _SPIN_S + nbytes * _SPIN_S_PER_BYTE
    while time.monotonic() < end_s:
        os.sched_yield()  # backward may need the core, or another rank if there are fewer cores
        if _has_ended(request):
            return True
    return False


def _growing_sleep() -> Callable[[], None]:
    pause_s = _SHORTEST_SLEEP_S

    def sleep() -> None:
        nonlocal pause_s
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_SLEEP_S)

    return sleep


def _cause(transport: Transport, call: CollectiveCall, error: Exception) -> HostOptError:
    """Returns the error of the ring, which names the rank, or one with the words of MPI."""
    deadline_s = time.monotonic() + _CAUSE_S
    while transport.error is None and time.monotonic() < deadline_s:
        time.sleep(_LONGEST_SLEEP_S)
    return transport.error or PeerLostError(
        f"MPI has failed in {call.name or 'a collective'} at step {call.step}: {error}. Check the "
        "messages of MPI above, and the network between the ranks",
        **transport.cluster.attributes(transport.rank),
        step=call.step,
        bucket=call.bucket,
        root_cause=str(error),
    )
