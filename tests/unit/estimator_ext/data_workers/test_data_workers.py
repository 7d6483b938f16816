"""Data workers: which elements the ranks get, and what is refused."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from harness import ROOT

import estimator_ext
import hostopt
from estimator_ext.pipelines.divided_pipeline import check_dataset
from hostopt.transport.addresses import greets
from hostopt.transport.server_sockets import confine

sys.path.insert(0, str(ROOT))


estimator_ext.install()


CLUSTER = {
    "chief": ["127.0.0.1:2001"],
    "worker": ["127.0.0.1:2002"],
    "data": ["127.0.0.1:2003", "127.0.0.1:2004"],
}


# -- refused -------------------------------------------------------------------------------


@pytest.fixture
def in_task(monkeypatch: pytest.MonkeyPatch) -> Callable[..., estimator_ext.HostOffloadStrategy]:
    """`in_task(type, **options)` makes this process a task of a cluster with data workers."""

    def strategy_of(task: str, jobs: Any = None, **options: Any) -> Any:
        config = {"cluster": jobs or CLUSTER, "task": {"type": task, "index": 0}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        return estimator_ext.HostOffloadStrategy(**options)

    return strategy_of


def estimator_of(strategy: Any, model_dir: Path) -> Any:
    config = estimator_ext.RunConfig(train_distribute=strategy)
    return estimator_ext.Estimator(lambda features: None, str(model_dir), config)


def test_the_role_data(in_task: Any, tmp_path: Path) -> None:
    strategy = in_task("data")
    assert strategy.cluster.rank is None
    assert strategy.cluster.size == 2
    assert [task.name for task in strategy.cluster.data] == ["data:0", "data:1"]
    estimator = estimator_of(strategy, tmp_path)
    assert not estimator.config.is_chief
    assert not estimator.config.cluster_spec.jobs
    with pytest.raises(hostopt.ConfigError, match=r"Estimator.evaluate is called in data:0"):
        estimator.evaluate(lambda: None)
    with pytest.raises(hostopt.ConfigError, match=r"Estimator.predict is called in data:0"):
        estimator.predict(lambda: None)
    with pytest.raises(hostopt.ConfigError, match=r"Estimator.export is called in data:0"):
        estimator.export_saved_model(str(tmp_path), lambda: None)
    with pytest.raises(hostopt.ConfigError, match=r"data:0, .* is not part of the ring"):
        strategy.communicator  # noqa: B018


def test_other_machines_are_refused_unless_insecure(in_task: Any, tmp_path: Path) -> None:
    jobs = {**CLUSTER, "worker": ["10.0.0.2:2002"]}
    refusal = r"worker:0, 10.0.0.2:2002 is not on a loopback address: .*knows neither token"
    with pytest.raises(hostopt.ConfigError, match=refusal):
        estimator_of(in_task("data", jobs), tmp_path).train(lambda: None)
    from estimator_ext.data_workers.worker import check_reach

    with pytest.raises(hostopt.ConfigError, match=refusal):
        check_reach(in_task("chief", jobs).cluster, hostopt.Options())
    assert not check_reach(in_task("chief", jobs).cluster, hostopt.Options(insecure=True))
    assert check_reach(in_task("chief").cluster, hostopt.Options())
    with pytest.raises(hostopt.ConfigError, match=r"data:0, \[::1\]:2003 has an address of IPv6"):
        check_reach(
            in_task("chief", {**CLUSTER, "data": ["[::1]:2003"]}).cluster, hostopt.Options()
        )


def test_a_data_service_needs_data_workers(in_task: Any) -> None:
    alone = {name: each for name, each in CLUSTER.items() if name != "data"}
    for strategy in (in_task("chief", alone), estimator_ext.HostOffloadStrategy(None)):
        with pytest.raises(hostopt.ConfigError, match=r"there are no data workers. Start the tr"):
            estimator_ext.RunConfig(train_distribute=strategy, data_service="dynamic")
    with pytest.raises(hostopt.ConfigError, match="only ranks of a HostOffloadStrategy"):
        estimator_ext.RunConfig(data_service="distributed_epoch")
    for mode in (None, "off"):
        assert estimator_ext.RunConfig(data_service=mode).data_service == mode
    with pytest.raises(ValueError, match="data_service is 'on', wanted one of distributed_epo"):
        estimator_ext.RunConfig(data_service="on")


def test_data_of_data_workers_are_not_read_again(in_task: Any) -> None:
    config = {"train_distribute": in_task("chief"), "resume_data": "skip"}
    with pytest.raises(hostopt.ConfigError, match="an order that differs each time"):
        estimator_ext.RunConfig(**config)
    assert estimator_ext.RunConfig(**config, data_service="off").resume_data == "skip"


@pytest.fixture
def in_graph() -> Iterator[None]:
    with tf.Graph().as_default():
        yield


def python_function(x: Any) -> Any:
    return tf.numpy_function(lambda value: value, [x], tf.int64)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.data.Dataset.range(3).map(python_function),
        lambda: tf.data.Dataset.range(3).map(lambda x: tf.py_function(lambda v: v, [x], tf.int64)),
        lambda: tf.data.Dataset.from_generator(lambda: iter([1]), tf.int64, []),
        lambda: tf.data.Dataset.range(3).map(
            lambda x: tf.cond(x > 0, lambda: python_function(x), lambda: x)
        ),
        lambda: tf.data.Dataset.range(3).interleave(
            lambda x: tf.data.Dataset.from_tensors(x).map(python_function)
        ),
    ],
)
@pytest.mark.usefixtures("in_graph")
def test_a_pipeline_with_python_is_refused(make: Any) -> None:
    numbers = tf.data.Dataset.range(3)
    check_dataset(numbers.map(lambda x: tf.cond(x > 0, lambda: x, lambda: x)), 2)
    with pytest.raises(hostopt.ConfigError, match=r"calls a Python function .*PyFunc"):
        check_dataset(make(), 1)


@pytest.mark.usefixtures("in_graph")
def test_a_pipeline_with_a_variable_is_refused() -> None:
    numbers = tf.data.Dataset.range(3)
    weight = tf.compat.v1.get_variable("weight", [], tf.int64)
    with pytest.raises(hostopt.ConfigError, match="reads 'weight' of type VarHandleOp"):
        check_dataset(numbers.map(lambda x: x + weight), 1)
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
    with pytest.raises(hostopt.ConfigError, match="of type MutableHashTable"):
        check_dataset(numbers.map(table.lookup), 1)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.usefixtures("in_graph")
def test_elements_that_would_not_match_are_refused(workers: int) -> None:
    numbers = tf.data.Dataset.range(3)
    for data in (tf.data.Dataset.zip((numbers, numbers)), numbers.enumerate().batch(2)):
        with pytest.raises(hostopt.ConfigError, match=r"joins 2 datasets with zip\(\) or enumer"):
            check_dataset(data, workers)
    choice = tf.data.Dataset.choose_from_datasets([numbers, numbers], numbers.map(lambda x: x % 2))
    with pytest.raises(hostopt.ConfigError, match=r"calls choose_from_datasets\(\)"):
        check_dataset(choice, workers)
    check_dataset(tf.data.Dataset.sample_from_datasets([numbers, numbers]), workers)
    for cached in (numbers.cache().repeat(), numbers.cache("file")):
        with pytest.raises(hostopt.ConfigError, match=r"calls cache\(\)"):
            check_dataset(cached, workers)
    # within an element, of which one data worker has all
    check_dataset(numbers.flat_map(lambda x: tf.data.Dataset.zip((numbers, numbers))), workers)


def test_only_datasets_can_be_prepared() -> None:
    with pytest.raises(hostopt.ConfigError, match=r"returned a ndarray, wanted a tf.data.Dat"):
        check_dataset(np.zeros(3), 1)


def test_a_data_worker_needs_its_own_port(in_task: Any) -> None:
    with pytest.raises(hostopt.ConfigError, match=r"Give every rank and every data wo"):
        in_task("data", {**CLUSTER, "data": ["127.0.0.1:2001"]})


def test_only_the_estimator_uses_data_workers(in_task: Any) -> None:
    data = tf.data.Dataset.range(3)
    with pytest.raises(hostopt.ConfigError, match=r"prepare the data of Estimator.train only"):
        in_task("chief").experimental_distribute_dataset(data)
    with pytest.raises(hostopt.ConfigError, match=r"prepare the data of Estimator.train only"):
        in_task("chief").distribute_datasets_from_function(lambda context: data)


# -- signs of life -------------------------------------------------------------------------


def test_a_server_of_tensorflow_greets() -> None:
    server = tf.data.experimental.service.DispatchServer()
    assert greets(server.target.removeprefix("grpc://"), 10.0)


# -- confinement ---------------------------------------------------------------------------


def test_a_server_is_confined_to_loopback() -> None:
    with socket.create_server(("", 0)) as server, socket.create_server(("", 0)) as other:
        port = server.getsockname()[1]
        confine(port)
        assert interface_of(server) == b"lo"
        assert interface_of(other) == b""
        with socket.create_connection(("127.0.0.1", port), 10):
            pass
    with pytest.raises(hostopt.ConfigError, match=f"no server at port {port} is found"):
        confine(port)


def test_servers_of_tensorflow_are_confined() -> None:
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.removeprefix("grpc://")
    confine(int(address.rpartition(":")[2]))
    worker = service.WorkerServer(service.WorkerConfig(address))
    data = tf.data.Dataset.range(3).apply(service.distribute("distributed_epoch", address))
    assert sorted(data.as_numpy_iterator()) == [0, 1, 2]
    del worker


def interface_of(server: socket.socket) -> bytes:
    """Returns the network interface to which a socket is bound; empty for all."""
    return server.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")
