"""`srun` and `sbatch` of a Slurm that this test starts. It needs root and Debian's slurm-wlm."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_table
import pytest
from harness import PROGRAMS, ROOT, deadline_s, reserved_addresses, until

HOSTOPT = [sys.executable, "-m", "hostopt"]
PROGRAM = [sys.executable, str(PROGRAMS / "reduces_rank.py")]
CONF = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName={host} CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands reach the daemons of this test."""
    directory = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (directory / name).mkdir()
    key = directory / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    with reserved_addresses(2) as addresses:
        ports = [address.rpartition(":")[2] for address in addresses]
    host = socket.gethostname().partition(".")[0]
    conf = directory / "slurm.conf"
    controller, daemon = ports
    conf.write_text(
        CONF.format(
            host=host,
            controller=controller,
            daemon=daemon,
            directory=directory,
            cores=os.cpu_count(),
        )
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOSTOPT_")}
    environ = {**kept, "SLURM_CONF": str(conf), "PYTHONPATH": str(ROOT)}
    munge = ["munged", "--foreground", "--force", f"--key-file={key}"]
    munge += [f"--socket={directory}/munge.socket", f"--pid-file={directory}/munge.pid"]
    munge += [f"--log-file={directory}/munge.log", f"--seed-file={directory}/munge.seed"]
    daemons = [
        subprocess.Popen(command, env=environ)
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D", "-N", host])
    ]
    try:
        until(lambda: "idle" in output_of(["sinfo", "-h", "-o", "%T"], environ), "node", 60.0)
        yield environ
    finally:
        for each in reversed(daemons):
            each.terminate()
            each.wait(30.0)


def output_of(command: list[str], environ: dict[str, str]) -> str:
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False).stdout


def srun(environ: dict[str, str], *arguments: str) -> Any:
    return subprocess.run(
        ["srun", "--kill-on-bad-exit=1", "--overcommit", *arguments],
        env=environ,
        capture_output=True,
        check=False,
        text=True,
        timeout=deadline_s(90.0),
    )


@pytest.mark.parametrize("way", ["exec", "alone"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_tasks_of_a_step_are_ranks(slurm: dict[str, str], way: str, size: int) -> None:
    command = [*HOSTOPT, "exec", "--", *PROGRAM] if way == "exec" else PROGRAM
    result = srun(slurm, "-n", str(size), *command)
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert sorted(each["rank"] for each in found) == list(range(size))
    assert all(each["ranks"] == list(range(size)) for each in found)


def test_the_exit_code_of_a_task(slurm: dict[str, str]) -> None:
    assert srun(slurm, "-n", "2", *HOSTOPT, "exec", *PROGRAM, "7").returncode == 7


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_task_takes_a_gpu(slurm: dict[str, str], size: int) -> None:
    expected = gpu_table.cases_of(size)
    command = [*HOSTOPT, "exec", "--", *gpu_table.PROGRAM, *expected]
    result = srun(slurm, "-n", str(size), *command)
    assert gpu_table.taken_in(result.stdout) == expected


BATCH = """#!/bin/sh
#SBATCH --ntasks=2 --overcommit --requeue --open-mode=append
srun --kill-on-bad-exit=1 --overcommit {hostopt} exec -- {program} {arguments}
code=$?
if [ $code -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; sleep 60; fi
exit $code
"""


def test_a_job_that_is_requeued_resumes(slurm: dict[str, str], tmp_path: Path) -> None:
    script, log = tmp_path / "job.sh", tmp_path / "job.log"
    example = f"{sys.executable} {ROOT / 'examples/mnist/main.py'}"
    script.write_text(
        BATCH.format(
            hostopt=" ".join(HOSTOPT),
            program=example,
            arguments=f"--model-dir {tmp_path / 'model'} --steps 3000",
        )
    )
    submitted = output_of(["sbatch", "--parsable", f"--output={log}", str(script)], slurm)
    job = submitted.strip()

    def step() -> int:
        found = re.findall(r"step = (\d+)", log.read_text() if log.exists() else "")
        return max(map(int, found), default=0)

    until(lambda: step() >= 100, "steps", 120.0)
    subprocess.run(["scancel", "--signal=TERM", job], env=slurm, check=True)
    until(lambda: "Restoring parameters" in log.read_text(), "restart", 180.0)
    subprocess.run(["scancel", job], env=slurm, check=True)
    saved = re.findall(r"model.ckpt-(\d+)", log.read_text())
    assert max(map(int, saved)) >= 100
