"""Data workers: which elements the ranks get, and what is refused."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from harness import reserved_addresses
from served import Served, served

import estimator_ext
import hostopt
from estimator_ext.data_service import check_dataset
from hostopt.transport.greeting import greets

estimator_ext.install()

pytestmark = [pytest.mark.tensorflow]
__all__ = ["served"]

CLUSTER = {
    "chief": ["127.0.0.1:2001"],
    "worker": ["127.0.0.1:2002"],
    "data": ["127.0.0.1:2003", "127.0.0.1:2004"],
}


def test_each_element_goes_to_one_rank_once(served: Served) -> None:
    arguments = ("-np", "2", "--data-workers", "2", "--evaluators", "1")
    output = served.run(*arguments, count=102, evaluates=True, max_steps=1000)
    assert served.elements() == list(range(1, 103))
    assert "2 data workers prepare the data (distributed_epoch)" in output
    assert "metrics {'loss': " in output  # the evaluator reads all data itself
    assert "(51.5)" in output
    for task in ("data:0", "data:1", "chief:0", "worker:0"):
        assert f"{task} has ended" in output


def test_an_input_context_names_the_only_pipeline(served: Served) -> None:
    served.run("-np", "2", "--data-workers", "1", count=40, epochs=2, takes_context=True)
    assert served.elements() == sorted([*range(1, 41)] * 2)
    assert {tuple(each) for each in served.batches("context")} == {(1, 0, 2)}
    batches = [*served.batches("chief-0"), *served.batches("worker-0")]
    assert {len(batch) for batch in batches} == {4}  # half of the global size


def test_a_resumed_training_reads_the_data_from_the_beginning(served: Served) -> None:
    arguments = ("-np", "1", "--data-workers", "1")
    first = served.run(*arguments, count=40, max_steps=3, config={"data_service": "dynamic"})
    assert "its data cannot be saved with the checkpoints, and are read from the begin" in first
    seen = served.elements()
    assert len(seen) == 12
    second = served.run(*arguments, count=40)
    assert "the data are read from the beginning: no position was saved" in second
    assert served.elements() == sorted([*seen, *range(1, 41)])


def test_ranks_read_their_own_data_if_the_service_is_off(served: Served) -> None:
    config = {"data_service": "off"}
    served.run("-np", "2", "--data-workers", "1", count=40, config=config)
    for task in ("chief-0", "worker-0"):
        assert served.elements([task]) == list(range(1, 41))


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
    from estimator_ext.data_worker import check_reach

    with pytest.raises(hostopt.ConfigError, match=refusal):
        check_reach(in_task("chief", jobs).cluster, hostopt.Options())
    assert not check_reach(in_task("chief", jobs).cluster, hostopt.Options(insecure=True))
    assert check_reach(in_task("chief").cluster, hostopt.Options())


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
def test_a_pipeline_with_python_is_refused(make: Any) -> None:
    with tf.Graph().as_default():
        check_dataset(tf.data.Dataset.range(3).map(lambda x: tf.cond(x > 0, lambda: x, lambda: x)))
        with pytest.raises(hostopt.ConfigError, match=r"calls a Python function .*PyFunc"):
            check_dataset(make())


def test_only_datasets_can_be_prepared() -> None:
    with pytest.raises(hostopt.ConfigError, match=r"returned a ndarray, wanted a tf.data.Dat"):
        check_dataset(np.zeros(3))


def test_a_data_worker_needs_its_own_port(in_task: Any) -> None:
    with pytest.raises(hostopt.ConfigError, match=r"Give every rank and every data wo"):
        in_task("data", {**CLUSTER, "data": ["127.0.0.1:2001"]})


# -- signs of life -------------------------------------------------------------------------


def test_only_a_server_of_http2_greets() -> None:
    server = tf.data.experimental.service.DispatchServer()
    assert greets(server.target.removeprefix("grpc://"), 10.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, as a frozen process does
        assert not greets(f"127.0.0.1:{silent.getsockname()[1]}", 0.1)
    with reserved_addresses(1) as (address,):
        assert not greets(address, 0.1)
