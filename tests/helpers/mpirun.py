"""Starts programs with the mpirun of several kinds, which `make nightly` installs."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from harness import ROOT, deadline_s

LAUNCHERS = ("openmpi-5", "openmpi-4", "mpich-5")
HOSTOPT = (sys.executable, "-m", "hostopt")
# mpirun of a user, on a machine with fewer cores than ranks
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
# options of mpirun with which the other processes go on if one dies; MPICH always ends them
KEEP_OTHERS = {
    "openmpi-5": ("--runtime-options", "recoverable"),
    "openmpi-4": ("--enable-recovery",),
    "mpich-5": (),
}


def command_of(launcher: str, size: int, *command: object, options: Any = ()) -> list[str]:
    """The command that starts a program as ranks of a launcher."""
    mpirun = ROOT / ".launchers" / launcher / "bin" / "mpirun"
    assert mpirun.exists(), "run `make nightly`"
    return [str(mpirun), *options, "-np", str(size), *map(str, command)]


def environ_of(launcher: str, **environ: str) -> dict[str, str]:
    """The environment of an mpirun, and of the MPI library that belongs to it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOSTOPT_")}
    library = str(ROOT / ".launchers" / launcher / "lib")
    return {**kept, **OPEN_MPI, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": library, **environ}


def run(
    launcher: str,
    size: int,
    *command: object,
    options: Any = (),
    limit_s: float = 90.0,
    code: int | None = 0,
    **env: str,
) -> Any:
    """Starts a command with the mpirun of one of `LAUNCHERS`, and returns its result.

    Args:
      code: exit code that it must have; None for any.
    """
    result = subprocess.run(
        command_of(launcher, size, *command, options=options),
        env=environ_of(launcher, **env),
        capture_output=True,
        check=False,
        text=True,
        timeout=deadline_s(limit_s),
    )
    assert code in (None, result.returncode), f"{result.returncode}: {result.stderr[-3000:]}"
    return result
