"""The GPU of each rank on machines with several numbers of GPUs, under several launchers."""

from __future__ import annotations

import pytest
from gpu_table import PROGRAM, cases_of, taken_in
from launcher import Launcher
from mpirun import HOSTOPT, run

LIMIT_S = 90.0
SIZES = [1, 2, 4]


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_takes_a_gpu(launcher: Launcher, size: int) -> None:
    expected = cases_of(size)
    output, _ = launcher.ended("-np", str(size), "--", *PROGRAM, *expected, limit_s=LIMIT_S)
    assert taken_in(output) == expected


@pytest.mark.parametrize("kind", ["openmpi-5", "mpich-5"])
@pytest.mark.parametrize("size", SIZES)
def test_each_rank_of_mpirun_takes_a_gpu(kind: str, size: int) -> None:
    expected = cases_of(size)
    assert (
        taken_in(run(kind, size, *HOSTOPT, "exec", "--", *PROGRAM, *expected).stdout) == expected
    )


def test_each_rank_takes_the_gpu_that_ray_reserves(launcher: Launcher) -> None:
    from ray_nodes import Nodes

    nodes = Nodes()
    try:
        nodes.add(num_cpus=4, num_gpus=4)
        options = (*nodes.options, "--resources", "CPU=1,GPU=1")
        for size in SIZES:
            command = ("-np", str(size), "--", *PROGRAM, "4")
            output, _ = launcher.ended(*options, *command, limit_s=LIMIT_S)
            (taken,) = taken_in(output).values()
            assert sorted(taken) == ["0", "1", "2", "3"][:size]
    finally:
        nodes.close()
