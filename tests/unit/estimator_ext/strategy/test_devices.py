"""Each rank of a host takes one of its GPUs, which are simulated here."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import pytest
import tensorflow as tf
from rings import Spawn

import hostopt
from estimator_ext import HostOffloadStrategy
from estimator_ext.strategy.devices import Accelerator, find_accelerator
from hostopt.tensorflow.background import HOST_DEVICE

GPU = "/device:GPU:0"


@dataclass
class Devices:
    """The GPUs of a host, as `tf.config` shows them to a process."""

    count: int = 0
    visible: list[str] | None = None
    are_open: bool = False

    def list_physical_devices(self, kind: str) -> list[str]:
        return [f"{kind} {number}" for number in range(self.count)]

    def get_visible_devices(self, kind: str) -> list[str]:
        return self.list_physical_devices(kind) if self.visible is None else self.visible

    def set_visible_devices(self, device: str, kind: str) -> None:
        if self.are_open:
            raise RuntimeError("Visible devices cannot be modified after being initialized")
        self.visible = [device]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    devices = Devices()
    for name in ("list_physical_devices", "get_visible_devices", "set_visible_devices"):
        monkeypatch.setattr(tf.config, name, getattr(devices, name))
    for name in ("CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH"):
        monkeypatch.delenv(name, raising=False)
    return devices


def cluster(rank: int, hosts: str) -> hostopt.Cluster:
    """A cluster with a rank on each of some hosts, such as "aab"; rank -1 is an evaluator."""
    letters = {"a": "127.0.0.1", "b": "127.0.0.2", "c": "127.0.0.3"}
    workers = [f"{letters[host]}:{3000 + i}" for i, host in enumerate(hosts)]
    task = ("evaluator", 0) if rank < 0 else ("worker", rank)
    return hostopt.Cluster.from_dict({"worker": workers}, *task)


@pytest.mark.parametrize(
    ("hosts", "count", "gpus"),
    [
        ("a", 1, [()]),
        ("a", 4, [()]),  # as without ranks, TensorFlow takes the first one
        ("aa", 1, [(0,), (0,)]),
        ("aa", 2, [(0,), (1,)]),
        ("aa", 4, [(0,), (1,)]),
        ("aaaa", 2, [(0,), (1,), (0,), (1,)]),
        ("aaaa", 4, [(0,), (1,), (2,), (3,)]),
        ("abab", 2, [(0,), (0,), (1,), (1,)]),
        ("abc", 1, [(), (), ()]),
    ],
)
def test_each_rank_of_a_host_takes_a_gpu(
    devices: Devices, hosts: str, count: int, gpus: list[tuple[int, ...]]
) -> None:
    devices.count = count
    for rank, own in enumerate(gpus):
        devices.visible = None
        found = find_accelerator(cluster(rank, hosts), None)
        assert (found.device, found.gpus) == (GPU, own)
        visible = devices.get_visible_devices("GPU")
        assert visible == ([f"GPU {own[0]}"] if own else devices.list_physical_devices("GPU"))
        devices.are_open = True  # another strategy of the process
        assert find_accelerator(cluster(rank, hosts), None) == found
        devices.are_open = False


@pytest.mark.parametrize("size", [1, 2, 4])
def test_without_a_gpu_each_rank_computes_on_its_cpu(devices: Devices, size: int) -> None:
    del devices
    for rank in range(size):
        assert find_accelerator(cluster(rank, "a" * size), None).device == HOST_DEVICE


def test_an_evaluator_does_not_look_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tf.config, "list_physical_devices")
    assert find_accelerator(cluster(-1, "aa"), None) == Accelerator(HOST_DEVICE)


def test_what_the_user_has_chosen_stays(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.count = 4
    second = cluster(1, "aa")
    assert find_accelerator(second, "/device:GPU:3") == Accelerator("/device:GPU:3")
    devices.visible = ["GPU 2", "GPU 3"]  # by tf.config
    assert find_accelerator(second, None) == Accelerator(GPU, (2, 3))
    assert devices.visible == ["GPU 2", "GPU 3"]
    devices.visible = ["GPU 0"]
    assert find_accelerator(cluster(0, "a"), None) == Accelerator(GPU, (0,))
    devices.visible = []
    assert find_accelerator(second, None) == Accelerator(HOST_DEVICE)
    devices.count, devices.visible = 1, None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # by a launcher, for each process
    assert find_accelerator(second, None) == Accelerator(GPU, (), "CUDA_VISIBLE_DEVICES=3")


def test_a_rank_takes_one_of_several_that_a_launcher_shows(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices.count = 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert find_accelerator(cluster(1, "aa"), None).gpus == (1,)


def test_gpus_that_are_open_are_an_error(devices: Devices) -> None:
    devices.count, devices.are_open = 2, True
    with pytest.raises(hostopt.ConfigError, match="has opened all 2 GPUs, wanted only GPU 1"):
        find_accelerator(cluster(1, "aa"), None)


def configured(found: Accelerator, **options: Any) -> Any:
    config = tf.compat.v1.ConfigProto()
    for name, value in options.items():
        setattr(config.gpu_options, name, value)
    found.configure(config)
    return config.gpu_options


def test_a_session_sees_the_gpu_of_its_rank() -> None:
    assert configured(Accelerator(GPU, (3,))).visible_device_list == "3"
    assert configured(Accelerator(GPU, (2, 3))).visible_device_list == "2,3"
    assert configured(Accelerator(GPU)).visible_device_list == ""
    assert configured(Accelerator(GPU, (3,)), visible_device_list="5").visible_device_list == "5"


@pytest.mark.parametrize(
    ("hosts", "options", "sharing"),
    [
        ("aaaa", {}, ["0, 2", "1, 3", "0, 2", "1, 3"]),
        ("aaab", {}, ["0, 2", None, "0, 2", None]),
        ("aabb", {}, [None] * 4),
        ("aaaa", {"allow_growth": True}, [None] * 4),
        ("aaaa", {"per_process_gpu_memory_fraction": 0.4}, [None] * 4),
        ("aabb", {"visible_device_list": "5"}, ["0, 1", "0, 1", "2, 3", "2, 3"]),
    ],
)
def test_ranks_share_a_gpu_only_if_its_memory_grows(
    spawn: Spawn, hosts: str, options: dict[str, Any], sharing: list[str | None]
) -> None:
    def check(communicator: hostopt.Communicator) -> None:
        rank = communicator.rank
        found, config = Accelerator(GPU, (rank % 2,)), tf.compat.v1.ConfigProto()
        for name, value in options.items():
            setattr(config.gpu_options, name, value)
        found.configure(config)
        ranks = sharing[rank]
        refused = pytest.raises(hostopt.ConfigError, match=rf"^ranks {ranks} of .*=true$")
        with refused if ranks else contextlib.nullcontext():
            found.check_alone(cluster(rank, hosts), communicator, config)

    spawn(4, check)


@pytest.mark.parametrize(
    "found",
    [
        [Accelerator(HOST_DEVICE)] * 2,  # no GPU, whatever the list says
        [Accelerator(GPU, (), f"CUDA_VISIBLE_DEVICES={rank}") for rank in range(2)],
        [Accelerator(GPU, (0,), f"CUDA_VISIBLE_DEVICES={rank},{rank + 2}") for rank in range(2)],
    ],
)
def test_the_same_number_may_be_another_gpu(spawn: Spawn, found: list[Accelerator]) -> None:
    def check(communicator: hostopt.Communicator) -> None:
        config = tf.compat.v1.ConfigProto()
        config.gpu_options.visible_device_list = "0"
        rank = communicator.rank
        found[rank].check_alone(cluster(rank, "aa"), communicator, config)

    spawn(2, check)


def test_ranks_with_the_same_variable_are_warned(
    spawn: Spawn, caplog: pytest.LogCaptureFixture
) -> None:
    def check(communicator: hostopt.Communicator) -> None:
        found = Accelerator(GPU, given="CUDA_VISIBLE_DEVICES=0")
        alone = cluster(communicator.rank, "aab")
        found.check_alone(alone, communicator, tf.compat.v1.ConfigProto())

    spawn(3, check)
    assert len(caplog.messages) == 2  # not of the rank that is alone on its host
    (message,) = set(caplog.messages)
    assert message.startswith("ranks 0, 1 of this host have CUDA_VISIBLE_DEVICES=0. ")


@pytest.mark.parametrize(
    ("count", "options", "pins"),
    [(1, {}, True), (0, {}, False), (1, {"variables_on_host": False}, False)],
)
def test_one_rank_copies_from_pinned_memory(
    devices: Devices, count: int, options: dict[str, Any], pins: bool
) -> None:
    devices.count = count
    strategy = HostOffloadStrategy(**options)
    config = strategy.update_config_proto(tf.compat.v1.ConfigProto())
    assert config.gpu_options.force_gpu_compatible == pins


@pytest.mark.parametrize(("cores", "is_disabled"), [({0}, True), ({0, 1}, False)])
def test_threads_of_a_rank_with_one_core_do_not_spin(
    cores: set[int], is_disabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    config = HostOffloadStrategy().update_config_proto(None)
    assert config.experimental.disable_thread_spinning == is_disabled
