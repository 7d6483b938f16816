"""MPI in this process: loaded at the first use, started and ended by one thread.

MPI_Init and MPI_Finalize return when all processes of the launcher have called them, and the same
thread must call both. So a daemon thread does, and others wait for it with a deadline.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import ctypes
import functools
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from hostopt.errors import ConfigError
from hostopt.options import Options

_log = logging.getLogger(__name__)

_POLL_S = 0.05
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
    """The thread that starts and ends MPI.

    Attributes:
      has_failed: True if a ring was aborted; then the others may never call MPI_Finalize.
      end_timeout_s: time to wait in MPI_Finalize, in seconds.
      pid: the process that has this thread; a forked child has not.
      is_ours: True once this thread has started MPI, and so has to end it.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Callable[[], Any]]]
        self._calls = queue.SimpleQueue()
        self.pid = os.getpid()
        self.is_ours = False
        self.has_failed = False
        self.end_timeout_s = 0.0
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

    def end(self) -> None:
        """Ends MPI; runs on the thread."""
        _call_library("MPI_Finalize")

    def _run(self) -> None:
        while True:
            future, function = self._calls.get()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)


def prepare(options: Options) -> Runtime:
    """Loads MPI, and makes this process end it at exit.

    Call this before the ring is connected: what is registered first at exit runs last, so the
    other ranks know that this one has left when it waits in MPI_Finalize.

    Args:
      options: `evaluator_timeout_s`, which is also how long this process waits for the others at
        exit, as an evaluator may be among them.
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
    """Starts MPI in the background, for a process that is not part of the ring.

    The ranks cannot start or end MPI unless all processes of the launcher do.
    """
    runtime = prepare(options)
    runtime.call(runtime.start)


def library_version() -> str:
    """Returns the name and version of the MPI library."""
    lines = str(load().Get_library_version()).splitlines()
    return " ".join(lines[0].replace("\0", "").split(",")[0].split())


def keep(*objects: object) -> None:
    """Keeps a request that is given up and its buffers, and makes this process not end MPI."""
    _kept.append(objects)


def wait_for(
    future: concurrent.futures.Future[Any], timeout_s: float, check: Callable[[], object]
) -> Any:
    """Waits for a call on the thread of MPI.

    Args:
      check: called often; raises an error if the wait is hopeless.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        check()
        left_s = deadline_s - time.monotonic()
        try:
            return future.result(max(min(_POLL_S, left_s), 0.0))
        except concurrent.futures.TimeoutError:
            if left_s <= 0:
                raise


def _end(runtime: Runtime) -> None:
    """Ends MPI at exit, if all collectives of this process have ended well."""
    if not runtime.is_ours or runtime.pid != os.getpid() or runtime.has_failed or _kept:
        return
    try:
        wait_for(runtime.call(runtime.end), runtime.end_timeout_s, lambda: None)
    except concurrent.futures.TimeoutError:
        _log.warning(
            "MPI_Finalize has waited %g s for other processes of the launcher: this process ends "
            "without it. Check what the others are doing, or raise evaluator_timeout_s",
            runtime.end_timeout_s,
        )
