"""Starts the workers of a training benchmark: alone, side by side, or as ranks."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

_COMMUNICATION = {"host": "auto", "grpc": "grpc"}


def run(
    how: str, program: Sequence[object], timeout_s: float, python: Path | None = None
) -> list[dict[str, Any]]:
    """Runs the workers of one measurement; all compute with the same number of threads.

    Args:
      how: "one" for one process; "two" for two independent processes at once, which get a
        directory to synchronize in as --meeting; "host" or "grpc" for ranks of hostopt in shared
        memory or over gRPC; "horovod-gloo" or "horovod-mpi" for ranks of Horovod.
      program: path of the worker's program and its arguments.
      timeout_s: seconds after which all workers are ended.
      python: interpreter of the workers; this one if None.

    Returns:
      The result of each worker.

    Raises:
      BenchmarkError: a worker failed.
    """
    worker: list[object] = [python or sys.executable, *program]
    environ = dict(common.SAME_THREADS)
    if how == "one":
        return common.results_in(common.run(worker, timeout_s, environ), 1)
    if how == "two":
        return _run_two(worker, timeout_s, environ)
    if how in _COMMUNICATION:
        environ["HOSTOPT_COMMUNICATION"] = _COMMUNICATION[how]
        command = common.hostopt_run(2, *worker)
    else:
        command, variables = common.horovod(how.partition("-")[2], Path(str(worker[0])), *worker)
        environ.update(variables)
    return common.results_in(common.run(command, timeout_s, environ), 2)


def _run_two(
    worker: list[object], timeout_s: float, environ: dict[str, str]
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as meeting:
        both = [([*worker, "--meeting", meeting], environ)] * 2
        return common.results_in(common.run_together(both, timeout_s), 2)
