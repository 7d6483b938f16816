"""The environment variables and ports that the launcher gives to its tasks."""

from __future__ import annotations

import itertools
import json
import os
import textwrap
from pathlib import Path

import pytest
from doctors import install
from harness import python
from keras_ranks import HAS_KERAS_3
from launcher import launched, lines_of

from hostopt.cluster.cluster import Cluster
from hostopt.launch import environment
from hostopt.launch.engine import LocalEngine
from hostopt.launch.environment import with_defaults

pytestmark = pytest.mark.usefixtures("forwarded_signals_not_ignored")

CORES = len(os.sched_getaffinity(0))


def test_tf_config_of_each_task(capfd: pytest.CaptureFixture[str]) -> None:
    command = python("import os; print(os.environ['TF_CONFIG'])")
    assert launched(command, size=3, evaluators=2) == 0
    out = capfd.readouterr().out
    roles = {}
    for task in ("chief:0", "worker:0", "worker:1", "evaluator:0", "evaluator:1"):
        (config,) = lines_of(out, task)
        cluster = Cluster.from_tf_config({"TF_CONFIG": config})
        assert cluster.task is not None
        roles[cluster.task.name] = (cluster.role, cluster.rank, cluster.size)
        addresses = [member.address for member in cluster.ring + cluster.evaluators]
        assert len(set(addresses)) == 5
        assert {address.rpartition(":")[0] for address in addresses} == {"127.0.0.1"}
    assert roles == {
        "chief:0": ("chief", 0, 3),
        "worker:0": ("worker", 1, 3),
        "worker:1": ("worker", 2, 3),
        "evaluator:0": ("evaluator", None, 3),
        "evaluator:1": ("evaluator", None, 3),
    }


def test_a_single_rank_is_the_chief(capfd: pytest.CaptureFixture[str]) -> None:
    assert launched(python("import os; print(os.environ['TF_CONFIG'])"), size=1) == 0
    (config,) = map(json.loads, lines_of(capfd.readouterr().out, "chief:0"))
    assert list(config["cluster"]) == ["chief"]
    assert config["task"] == {"type": "chief", "index": 0}


LISTEN = """
import errno, json, os, socket
config = json.loads(os.environ["TF_CONFIG"])
ports = [int(a.rpartition(":")[2]) for job in config["cluster"].values() for a in job]
task = config["task"]
port = int(config["cluster"][task["type"]][task["index"]].rpartition(":")[2])
"""


def test_ports_are_reserved_for_their_task(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = LISTEN + textwrap.dedent("""
        for taken in ports:
            with socket.socket() as other:  # like a program outside of the cluster
                try:
                    other.bind(("127.0.0.1", taken))
                except OSError as error:
                    assert error.errno == errno.EADDRINUSE
                else:
                    raise SystemExit(f"{taken} is not reserved")
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        client = socket.create_connection(("127.0.0.1", port))
        server.accept()[0].sendall(b"hello")
        print(client.recv(5).decode())
    """)
    assert launched(python(code), size=3, evaluators=1) == 0
    message = capfd.readouterr().out.splitlines()
    assert sorted(message) == sorted(
        f"[{task}] hello" for task in ("chief:0", "worker:0", "worker:1", "evaluator:0")
    )


def test_a_grpc_server_can_listen_on_its_port(capfd: pytest.CaptureFixture[str]) -> None:
    code = LISTEN + textwrap.dedent("""
        from concurrent import futures
        import grpc
        server = grpc.server(futures.ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
        assert server.add_insecure_port(f"127.0.0.1:{port}") == port
        server.start()
        channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        grpc.channel_ready_future(channel).result(timeout=60)
        print("ready")
        server.stop(None).wait()
    """)
    assert launched(python(code), size=2) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[chief:0] ready", "[worker:0] ready"]


THREADS = """
import os
names = "TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES"
names += ("TF_USE_LEGACY_KERAS",)
print(*(os.environ.get(name, "-") for name in names), sep=",")
"""


@pytest.mark.parametrize("size", [1, 2, CORES + 1])
def test_ranks_divide_the_cores(
    size: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert launched(python(THREADS), size=size, evaluators=1) == 0
    out = capfd.readouterr().out
    share, switch = max(1, CORES // size), "1" if HAS_KERAS_3 else "-"
    assert lines_of(out, "chief:0") == [f"{share},{share},1,0,{switch}"]
    assert lines_of(out, "evaluator:0") == [f"1,1,1,,{switch}"]


AFFINITY = "import json, os; print(json.dumps(sorted(os.sched_getaffinity(0))))"


def test_each_rank_is_bound_to_its_share_of_the_cores(capfd: pytest.CaptureFixture[str]) -> None:
    size = min(CORES, 3)
    assert launched(python(AFFINITY), size=size, evaluators=1) == 0
    out = capfd.readouterr().out
    tasks = ["chief:0", *(f"worker:{index}" for index in range(size - 1))]
    shares = [json.loads(*lines_of(out, task)) for task in tasks]
    every_core = sorted(os.sched_getaffinity(0))
    assert sorted(itertools.chain(*shares)) == every_core
    assert {len(share) for share in shares} <= {CORES // size, CORES // size + 1}
    assert json.loads(*lines_of(out, "evaluator:0")) == every_core


@pytest.mark.parametrize(("size", "binds"), [(CORES + 1, True), (2, False)])
def test_ranks_that_are_not_bound_use_all_cores(
    size: int, binds: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launched(python(AFFINITY), size=size, engine=LocalEngine(binds)) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == size
    assert all(line.endswith(json.dumps(sorted(os.sched_getaffinity(0)))) for line in lines)


def machine(
    root: Path, cores: list[tuple[int | None, int, int]], gpus: list[tuple[int, str]]
) -> Path:
    """Writes what Linux says of a machine.

    Args:
      cores: NUMA node, socket and core of each hardware thread; the node may be unknown.
      gpus: NUMA node (-1 if unknown) and vendor of each display controller, in bus order.
    """
    for number, (node, socket_id, core) in enumerate(cores):
        topology = root / f"devices/system/cpu/cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{socket_id}\n")
        (topology / "core_id").write_text(f"{core}\n")
        if node is not None:
            (topology.parent / f"node{node}").mkdir()
    for number, (node, vendor) in enumerate(gpus):
        device = root / f"bus/pci/devices/0000:{number:02x}:00.0"
        device.mkdir(parents=True)
        for name, text in {"numa_node": node, "vendor": vendor, "class": "0x030200"}.items():
            (device / name).write_text(f"{text}\n")
    network = root / "bus/pci/devices/0000:ff:00.0"
    network.mkdir(parents=True)
    for name, text in {"numa_node": 0, "vendor": "0x10de", "class": "0x020000"}.items():
        (network / name).write_text(f"{text}\n")
    return root


HYPERTHREADS = [(None, 0, 0), (None, 0, 1), (None, 0, 0), (None, 0, 1)]  # 0 and 2 share a core
TWO_NODES = [(0, 0, 0), (1, 0, 1), (0, 0, 2), (1, 0, 3)]  # of one socket
NVIDIA = "0x10de"


@pytest.mark.parametrize(
    ("cores", "gpus", "visible", "shares"),
    [
        (HYPERTHREADS, [], None, [[0, 2], [1, 3]]),
        (TWO_NODES, [], None, [[0, 2], [1, 3]]),
        (TWO_NODES, [(0, NVIDIA), (1, NVIDIA)], None, [[0, 2], [1, 3]]),
        (TWO_NODES, [(1, NVIDIA), (0, NVIDIA)], None, [[1, 3], [0, 2]]),
        (TWO_NODES, [(1, NVIDIA), (0, NVIDIA)], "1,0", [[0, 2], [1, 3]]),
        (TWO_NODES, [(1, NVIDIA), (0, NVIDIA)], "GPU-8f", [[0, 2], [1, 3]]),  # unknown
        (TWO_NODES, [(1, NVIDIA), (0, NVIDIA)], "", [[0, 2], [1, 3]]),  # none
        (TWO_NODES, [(0, NVIDIA), (1, NVIDIA)], "-1", [[0, 2], [1, 3]]),  # none
        (TWO_NODES, [(0, "0x1a03"), (1, NVIDIA), (0, NVIDIA)], None, [[1, 3], [0, 2]]),
        (TWO_NODES, [(-1, NVIDIA), (-1, NVIDIA)], None, [[0, 2], [1, 3]]),
        (
            TWO_NODES,
            [(1, NVIDIA), (1, NVIDIA), (0, NVIDIA), (0, NVIDIA)],
            None,
            [[1], [3], [0], [2]],
        ),
        (TWO_NODES, [(1, NVIDIA), (1, NVIDIA)], None, [[0, 2], [1, 3]]),  # one must be far away
    ],
)
def test_cores_of_a_rank_are_near_each_other_and_its_gpu(
    cores: list[tuple[int | None, int, int]],
    gpus: list[tuple[int, str]],
    visible: str | None,
    shares: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(len(cores))))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert environment.shares_of_cores(len(shares), machine(tmp_path, cores, gpus)) == shares


def test_only_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
    threads = [
        with_defaults({}, job, size)["OMP_NUM_THREADS"]
        for size, job in [
            (1, "chief"),
            (2, "chief"),
            (3, "worker"),
            (8, "worker"),
            (2, "evaluator"),
        ]
    ]
    assert threads == ["7", "3", "2", "1", "1"]


@pytest.mark.parametrize(("release", "value"), [("2.15.1", None), ("2.16.2", "1")])
def test_keras_2_is_chosen_where_there_is_keras_3(
    release: str, value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "tensorflow", release)
    monkeypatch.syspath_prepend(tmp_path)
    assert with_defaults({}, "chief", 1).get("TF_USE_LEGACY_KERAS") == value


def test_user_settings_override_the_defaults(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "5")
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "0")
    assert launched(python(THREADS), size=2, evaluators=1) == 0
    out = capfd.readouterr().out
    for task in ("worker:0", "evaluator:0"):
        (line,) = lines_of(out, task)
        assert line.startswith("5,6,") and line.endswith(",0")
