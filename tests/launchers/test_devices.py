"""The GPU of each rank on machines with several numbers of GPUs, under several launchers."""

from __future__ import annotations

import os
import subprocess

import pytest
from gpu_table import PROGRAM, cases_of, taken_in
from harness import QUIET, deadline_s
from mpirun import HOSTOPT, run


def hostopt_run(size: int, *arguments: str) -> str:
    command = [*HOSTOPT, "run", "-np", str(size), *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        check=True,
        env={**os.environ, **QUIET},
        text=True,
        timeout=deadline_s(90.0),
    ).stdout


@pytest.mark.parametrize("launcher", ["hostopt", "openmpi-5", "mpich-5"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_takes_a_gpu(launcher: str, size: int) -> None:
    expected = cases_of(size)
    command = ("--", *PROGRAM, *expected)
    if launcher == "hostopt":
        output = hostopt_run(size, *command)
    else:
        output = run(launcher, size, *HOSTOPT, "exec", *command).stdout
    assert taken_in(output) == expected


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_takes_the_gpu_that_ray_reserves(size: int) -> None:
    from ray_nodes import Nodes

    nodes = Nodes()
    try:
        nodes.add(num_cpus=4, num_gpus=4)
        options = (*nodes.options, "--resources", "CPU=1,GPU=1", "--", *PROGRAM)
        (taken,) = taken_in(hostopt_run(size, *options, "4")).values()
    finally:
        nodes.close()
    assert sorted(taken) == ["0", "1", "2", "3"][:size]
