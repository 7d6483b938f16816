"""Environments of launchers, as their documentation describes them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from hostopt.adapters import launchers, rendezvous
from hostopt.adapters.discover import find_place, set_tf_config
from hostopt.errors import ConfigError
from hostopt.options import Options

# one machine each, rank 1 of 4
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
    "PMI_FD": "9",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
}
SLURM = {
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "node7",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "node7",
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
}
SLURM_NODES = {
    **SLURM,
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NODELIST": "node[07-08],other1",
    "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "node08",
}
SAGEMAKER = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", "HOSTOPT_SIZE": "3"}


def found(environ: dict[str, str]) -> Any:
    place = find_place(environ)
    assert place is not None
    return place


@pytest.mark.parametrize("environ", [OPEN_MPI, SLURM], ids=["open mpi", "slurm"])
def test_ranks_of_one_machine_use_a_unix_socket(environ: dict[str, str]) -> None:
    place = found(environ)
    assert (place.rank, place.size, place.local_size) == (1, 4, 4)
    assert place.rendezvous.startswith("@")


def test_mpich_does_not_name_its_run() -> None:
    place = found(MPICH)
    assert (place.launcher, place.rank, place.size, place.local_size) == ("MPICH", 1, 4, 4)
    assert place.rendezvous is None  # no process above this one is a proxy of MPICH


@pytest.mark.parametrize(
    ("environ", "change"),
    [
        (OPEN_MPI, {"PMIX_NAMESPACE": "prterun-host-78@1"}),
        (SLURM, {"SLURM_STEP_ID": "4"}),
        (SLURM, {"SLURM_RESTART_COUNT": "1"}),
    ],
)
def test_runs_differ_in_their_rendezvous(environ: dict[str, str], change: dict[str, str]) -> None:
    assert found(environ).rendezvous != found({**environ, **change}).rendezvous


def test_the_first_node_of_slurm_is_the_rendezvous() -> None:
    place = found(SLURM_NODES)
    assert (place.rank, place.size, place.local_size) == (2, 4, 1)
    assert place.rendezvous.startswith("node07:")
    assert place.host == "node08"
    assert found({**SLURM_NODES, "SLURM_NODEID": "0"}).local_size == 2


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[3-9]", "n3"),
        ("n[007,9-11]x,b", "n007x"),
        ("rack[2-4]n[01-08],m[1-2]", "rack2n01"),
    ],
)
def test_first_node(nodes: str, first: str) -> None:
    assert launchers.first_node(nodes) == first


def test_hosts_of_sagemaker() -> None:
    place = found(SAGEMAKER)
    assert (place.rank, place.size) == (1, 2)
    assert place.addresses == ("algo-1:2222", "algo-2:2222")


def test_pods_of_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-1.ring.ns.svc.cluster.local")
    place = found(KUBERNETES)
    assert (place.rank, place.size) == (1, 3)
    assert place.addresses[2] == "train-2.ring.ns.svc.cluster.local:2222"


@pytest.mark.parametrize("variable", ["HOSTOPT_RENDEZVOUS", "TF_CONFIG"])
def test_pods_that_need_no_service(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "host")
    value = "a:1" if variable == "HOSTOPT_RENDEZVOUS" else tf_config(3, 1)
    assert found({**KUBERNETES, variable: value}).addresses == ()


@pytest.mark.parametrize("name", ["train-0.ring", "train-1", "host"])
def test_pods_without_a_service(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: name)
    with pytest.raises(ConfigError, match="headless service"):
        find_place(KUBERNETES)


def test_a_pod_without_the_number_of_pods_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert find_place({"JOB_COMPLETION_INDEX": "17"}) is None
    assert caplog.text.count("pod 17 of an Indexed Job, but HOSTOPT_SIZE is not set") == 1


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"])
def test_launchers_of_mpi(name: str) -> None:
    launchers.check_started({name: "0"})
    for environ in ({}, {name: "0", "HOSTOPT_ERROR_FILE": "set by hostopt run"}):
        with pytest.raises(ConfigError, match="has started this process, so MPI cannot reach"):
            launchers.check_started(environ)


def test_by_hand() -> None:
    environ = {"HOSTOPT_RANK": "1", "HOSTOPT_SIZE": "2", "HOSTOPT_RENDEZVOUS": "host:99"}
    place = found(environ)
    assert (place.rank, place.size, place.rendezvous) == (1, 2, "host:99")


def test_a_launcher_with_pmi_alone() -> None:
    place = found({"PMI_RANK": "1", "PMI_SIZE": "2", "HOSTOPT_RENDEZVOUS": "a:1"})
    assert (place.rank, place.size, place.local_size) == (1, 2, None)


def test_mpirun_on_hosts_of_sagemaker() -> None:
    place = found({**SAGEMAKER, **OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert (place.rank, place.size, place.rendezvous) == (1, 4, "algo-1:2222")


@pytest.mark.parametrize(
    ("environ", "run_id", "local_rank"),
    [
        (OPEN_MPI, "prterun-host-77@1", 1),
        (MPICH, "", 1),
        ({**SLURM_NODES, "SLURM_RESTART_COUNT": "2", "SLURM_LOCALID": "0"}, "812.3.2", 0),
        (SAGEMAKER, "", None),
    ],
)
def test_runs_and_local_ranks(environ: dict[str, str], run_id: str, local_rank: Any) -> None:
    place = found({**environ, "HOSTOPT_RENDEZVOUS": "a:1"})
    assert (place.run_id, place.local_rank) == (run_id, local_rank)


def test_mpirun_counts_in_a_job_of_slurm_or_sagemaker() -> None:
    assert found({**SLURM_NODES, **OPEN_MPI}).launcher == "Open MPI"
    assert found({**SAGEMAKER, **OPEN_MPI}).launcher == "Open MPI"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**OPEN_MPI, "HOSTOPT_ERROR_FILE": "/tmp/x"},  # started by `hostopt run`
        {k: v for k, v in SLURM.items() if "STEP" not in k},  # a batch script
        {"JOB_COMPLETION_INDEX": "1"},
        {**OPEN_MPI, "HOSTOPT_LAUNCHER": "none"},
        {"HOSTOPT_SIZE": "2", "HOSTOPT_RANK": "0", "HOSTOPT_LAUNCHER": "none"},
    ],
)
def test_no_place(environ: dict[str, str]) -> None:
    assert find_place(environ) is None


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({**OPEN_MPI, **MPICH, "PMI_RANK": "2"}, "MPICH says rank 2 of 4"),
        ({**SLURM, **SAGEMAKER}, "Slurm says rank 1 of 4, SageMaker says rank 1 of 2"),
        ({**SLURM, "HOSTOPT_RANK": "0", "HOSTOPT_SIZE": "4"}, "Slurm says rank 1 of 4"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK is 'x'"),
        ({"HOSTOPT_RANK": "1"}, "HOSTOPT_SIZE is not set"),
        ({"HOSTOPT_SIZE": "2"}, "HOSTOPT_SIZE is set, but neither HOSTOPT_RANK"),
        ({"HOSTOPT_RENDEZVOUS": "a:1"}, "HOSTOPT_RENDEZVOUS is set, but neither HOSTOPT_RANK"),
        ({**SLURM, "HOSTOPT_LAUNCHER": "slurm"}, "HOSTOPT_LAUNCHER is 'slurm'"),
        ({"HOSTOPT_RANK": "2", "HOSTOPT_SIZE": "2"}, "HOSTOPT_RANK is 2 and HOSTOPT_SIZE is 2"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_SIZE is 4"),
        ({**MPICH, "PMI_RANK": "9"}, "PMI_RANK is 9 and PMI_SIZE is 4"),
        ({**SLURM, "SLURM_PROCID": "4"}, "SLURM_PROCID is 4 and SLURM_STEP_NUM_TASKS is 4"),
        (
            {**SLURM_NODES, "SLURM_STEP_TASKS_PER_NODE": "two"},
            "SLURM_STEP_TASKS_PER_NODE is 'two'",
        ),
        ({**SLURM_NODES, "SLURM_NODEID": "b"}, "SLURM_NODEID is 'b'"),
        ({**KUBERNETES, "JOB_COMPLETION_INDEX": "3"}, "HOSTOPT_SIZE is 3"),
        ({**OPEN_MPI, "HOSTOPT_RENDEZVOUS": "host"}, "HOSTOPT_RENDEZVOUS is 'host'"),
        ({"SM_HOSTS": "[1", "SM_CURRENT_HOST": "a"}, "SM_HOSTS is"),
    ],
)
def test_contradictions_and_errors(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        find_place(environ)


def test_one_process_of_a_step_needs_no_cluster(environment: dict[str, str]) -> None:
    environment.update({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})
    place = set_tf_config(Options())
    assert place is not None
    assert place.size == 1
    assert "TF_CONFIG" not in environment


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the environment of this process."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    fake: dict[str, str] = dict(kept)
    monkeypatch.setattr(os, "environ", fake)
    return fake


def test_static_addresses_become_tf_config(environment: dict[str, str]) -> None:
    environment.update(SAGEMAKER)
    set_tf_config(Options())
    assert json.loads(environment["TF_CONFIG"]) == {
        "cluster": {"chief": ["algo-1:2222"], "worker": ["algo-2:2222"]},
        "task": {"type": "worker", "index": 0},
    }


def test_the_last_processes_are_evaluators(environment: dict[str, str]) -> None:
    hosts = ["algo-1", "algo-2", "algo-3"]
    environment.update({"SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": "algo-3"})
    set_tf_config(Options(), evaluators=1)
    config = json.loads(environment["TF_CONFIG"])
    assert config["task"] == {"type": "evaluator", "index": 0}
    assert {job: len(each) for job, each in config["cluster"].items()} == {
        "chief": 1,
        "worker": 1,
        "evaluator": 1,
    }


def test_processes_that_a_rank_starts_have_no_place(environment: dict[str, str]) -> None:
    environment.update(SAGEMAKER)
    set_tf_config(Options())
    assert find_place(environment) is not None
    code = "import os; from hostopt.adapters.discover import find_place as f; print(f(os.environ))"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "None\n"


def test_only_evaluators_are_refused(environment: dict[str, str]) -> None:
    environment.update(SAGEMAKER)
    with pytest.raises(ConfigError, match="no rank"):
        set_tf_config(Options(), evaluators=2)


def test_several_machines_without_a_rendezvous(environment: dict[str, str]) -> None:
    environment.update({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    with pytest.raises(ConfigError, match="HOSTOPT_RENDEZVOUS=host:port"):
        set_tf_config(Options())


def tf_config(size: int, rank: int) -> str:
    workers = [f"127.0.0.1:{1000 + i}" for i in range(size)]
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})


@pytest.mark.parametrize(("size", "rank"), [(4, 1), (3, 1), (2, 1)])
def test_a_tf_config_that_fits_is_kept(environment: dict[str, str], size: int, rank: int) -> None:
    text = tf_config(size, rank)
    environment.update({**OPEN_MPI, "TF_CONFIG": text})
    set_tf_config(Options())
    assert environment["TF_CONFIG"] == text


@pytest.mark.parametrize(("size", "rank"), [(4, 0), (5, 1), (3, 0)])
def test_a_tf_config_that_contradicts(environment: dict[str, str], size: int, rank: int) -> None:
    environment.update({**OPEN_MPI, "TF_CONFIG": tf_config(size, rank)})
    with pytest.raises(ConfigError, match=f"rank {rank} of {size} ranks, but Open MPI"):
        set_tf_config(Options())


@pytest.mark.parametrize(("evaluator", "is_same"), [(0, False), (1, True)])
def test_the_index_of_an_evaluator(
    environment: dict[str, str], evaluator: int, is_same: bool
) -> None:
    config = json.loads(tf_config(2, 0))
    config["task"] = {"type": "evaluator", "index": evaluator}
    text = json.dumps(config)
    environment.update({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "3", "TF_CONFIG": text})
    if is_same:
        set_tf_config(Options())
        return
    with pytest.raises(ConfigError, match="evaluator:0 of 2 ranks, but Open MPI"):
        set_tf_config(Options())


@pytest.mark.parametrize("options", [Options(), Options(tls_dir="certificates")])
def test_an_exchange_between_machines_needs_a_token(
    environment: dict[str, str], options: Options
) -> None:
    environment.update({**OPEN_MPI, "HOSTOPT_RENDEZVOUS": "node1:99"})
    with pytest.raises(ConfigError, match="HOSTOPT_TOKEN"):
        set_tf_config(options)


@pytest.mark.parametrize("allowed", ["insecure", "token", "loopback"])
def test_an_exchange_that_is_allowed(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, allowed: str
) -> None:
    monkeypatch.setattr(rendezvous, "exchange", lambda *_: ["a:1", "b:2", "c:3", "d:4"])
    environment.update({**OPEN_MPI, "HOSTOPT_RENDEZVOUS": "node1:99"})
    if allowed == "token":
        environment["HOSTOPT_TOKEN"] = "secret"
    if allowed == "loopback":
        environment["HOSTOPT_RENDEZVOUS"] = "127.0.0.1:99"
    set_tf_config(Options(insecure=allowed == "insecure"))
    assert json.loads(environment["TF_CONFIG"])["cluster"]["worker"] == ["b:2", "c:3", "d:4"]
