"""HostOffloadStrategy without an Estimator: roles, plain sessions, two in one process."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from harness import deadline_s, reserved_addresses
from strategies import as_ranks, resolver, session

import estimator_ext
import hostopt
from hostopt.tensorflow import reduce_in_buckets

estimator_ext.install()


@pytest.fixture
def addresses() -> Iterator[list[str]]:
    with reserved_addresses(2) as result:
        yield result


# -- a plain session -----------------------------------------------------------------------


def test_initializers_yield_the_values_of_rank_0(addresses: list[str]) -> None:
    def work(strategy: Any) -> Any:
        with strategy.scope():
            variables = [
                tf.compat.v1.get_variable(f"v{i}", initializer=np.float32([strategy.cluster.rank]))
                for i in range(8)  # more than there are threads to wait with
            ]
        with session(strategy) as run:
            run.run(tf.compat.v1.global_variables_initializer())
            return run.run(variables)

    for values in as_ranks(addresses, work):
        np.testing.assert_array_equal(values, np.zeros((8, 1)))


def test_run_and_reduce(addresses: list[str]) -> None:
    def work(strategy: Any) -> Any:
        rank = strategy.cluster.rank
        with strategy.scope():
            value = strategy.run(lambda x: x * 10, args=(tf.constant([rank + 1.0]),))
            total = strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None)
            mean = strategy.reduce(tf.distribute.ReduceOp.MEAN, value, axis=None)
        with session(strategy) as run:
            return run.run([total, mean])

    for total, mean in as_ranks(addresses, work):
        assert (total, mean) == ([30.0], [15.0])


def test_an_optimizer_in_run_sums_gradients_and_updates_on_the_host(addresses: list[str]) -> None:
    def work(strategy: Any) -> Any:
        rank = strategy.cluster.rank
        with strategy.scope():
            weight = tf.compat.v1.get_variable("w", [3], tf.float64, tf.zeros_initializer())
            optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)

            def step() -> tf.Operation:
                loss = tf.reduce_sum(weight * np.float64([1, 2, 3]) * (rank + 1))
                return optimizer.minimize(loss)

            train_op = strategy.run(step)
        assert weight.device.endswith("CPU:0")
        with session(strategy) as run:
            run.run(tf.compat.v1.global_variables_initializer())
            for _ in range(3):
                run.run(train_op)
            return run.run(weight)

    for value in as_ranks(addresses, work):
        np.testing.assert_array_equal(value, [-9.0, -18.0, -27.0])


def test_a_dataset_is_distributed_over_the_ranks(addresses: list[str]) -> None:
    def work(strategy: Any) -> Any:
        with strategy.scope():
            dataset = tf.data.Dataset.range(12).batch(4)
            iterator = strategy.experimental_distribute_dataset(dataset)
            iterator = iterator.make_initializable_iterator()
            batch = strategy.run(tf.identity, args=(iterator.get_next(),))
        with session(strategy) as run:
            run.run(iterator.initializer)
            return [run.run(batch).tolist() for _ in range(3)]

    result = as_ranks(addresses, work)
    assert [len(batch) for batches in result for batch in batches] == [2] * 6
    assert sorted(x for batches in result for batch in batches for x in batch) == list(range(12))


def test_a_monitored_training_session(addresses: list[str]) -> None:
    def work(strategy: Any) -> Any:
        with strategy.scope():
            rank = strategy.cluster.rank
            value = tf.compat.v1.get_variable("v", initializer=np.int64([rank + 7]))
        config = strategy.update_config_proto(tf.compat.v1.ConfigProto())
        with tf.compat.v1.train.MonitoredTrainingSession(config=config) as run:
            return int(run.run(value)[0])

    assert as_ranks(addresses, work) == [7, 7]


def test_two_pairs_of_ranks_in_one_process_are_independent() -> None:
    results: dict[int, Any] = {}

    def work(strategy: Any) -> Any:
        with strategy.scope():
            total = strategy.reduce(
                tf.distribute.ReduceOp.SUM, tf.constant(strategy.base + 1.0), axis=None
            )
        with session(strategy) as run:
            return [float(run.run(total)) for _ in range(20)]

    def pair(base: float) -> None:
        def with_base(strategy: Any) -> Any:
            strategy.base = base
            return work(strategy)

        with reserved_addresses(2) as addresses:
            results[int(base)] = as_ranks(addresses, with_base)

    threads = [threading.Thread(target=pair, args=(base,)) for base in (0.0, 100.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_s(90))
    assert results == {0: [[2.0] * 20] * 2, 100: [[202.0] * 20] * 2}


# -- roles and refusals --------------------------------------------------------------------


@pytest.mark.parametrize("config_class", [tf.estimator.RunConfig, estimator_ext.RunConfig])
def test_the_stock_estimator_is_refused_at_once(
    addresses: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config_class: Any
) -> None:
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    config = config_class(train_distribute=estimator_ext.HostOffloadStrategy())
    estimator = tf.estimator.Estimator(lambda features: None, str(tmp_path), config)
    spec = tf.estimator.TrainSpec(lambda: None, 1), tf.estimator.EvalSpec(lambda: None)
    with pytest.raises(hostopt.ConfigError, match=r"estimator_ext\.Estimator"):
        tf.estimator.train_and_evaluate(estimator, *spec)


def test_a_stock_run_config_takes_its_role_from_the_strategy(
    addresses: list[str], tmp_path: Path
) -> None:
    strategy = estimator_ext.HostOffloadStrategy(resolver(addresses, 1))
    config = tf.estimator.RunConfig(train_distribute=strategy)
    assert config.is_chief  # what the stock class makes of a cluster that TF_CONFIG does not name
    config = estimator_ext.Estimator(lambda features: None, str(tmp_path), config).config
    assert not config.is_chief
    assert (config.task_type, config.task_id, config.global_id_in_cluster) == ("worker", 1, 1)
    assert config.num_worker_replicas == 2
    assert config.train_distribute is strategy
    assert not config.master


def test_an_evaluator_needs_no_ring_and_no_accelerator(addresses: list[str]) -> None:
    strategy = estimator_ext.HostOffloadStrategy(resolver(addresses, 0, "evaluator"))
    assert strategy.accelerator.endswith("/device:CPU:0")
    session_config = tf.compat.v1.ConfigProto()
    config = estimator_ext.RunConfig(train_distribute=strategy, session_config=session_config)
    assert (config.task_type, config.is_chief) == ("evaluator", False)
    assert config.session_config.device_count["GPU"] == 0
    with pytest.raises(hostopt.ConfigError, match="is not part of the ring"):
        _ = strategy.communicator


def test_resolver_and_tf_config_must_name_the_same_cluster(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    estimator_ext.HostOffloadStrategy(resolver(addresses, 0))
    for other in (resolver(addresses, 1), resolver(addresses[::-1], 0)):
        with pytest.raises(hostopt.ConfigError, match="but TF_CONFIG names"):
            estimator_ext.HostOffloadStrategy(other)


def test_the_resolver_of_tf_config_is_an_attribute(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    found = estimator_ext.HostOffloadStrategy().cluster_resolver
    assert (found.task_type, found.task_id) == ("worker", 1)
    assert found.cluster_spec().as_dict() == {"worker": addresses}


def test_a_copy_is_the_strategy_itself(addresses: list[str]) -> None:
    strategy = estimator_ext.HostOffloadStrategy(resolver(addresses, 0))
    assert copy.deepcopy(strategy) is strategy


@contextlib.contextmanager
def reference_variables() -> Iterator[None]:
    tf.compat.v1.disable_resource_variables()
    try:
        yield
    finally:
        tf.compat.v1.enable_resource_variables()


def test_a_variable_of_version_1_is_true() -> None:
    with tf.Graph().as_default(), estimator_ext.HostOffloadStrategy().scope():
        kept = tf.compat.v1.get_variable("kept", [])
        with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
            bool(kept)
        with reference_variables():
            average = tf.compat.v1.train.ExponentialMovingAverage(0.9)
            variable = tf.compat.v1.get_variable("weight", [])
            assert not average.average(variable)
            average.apply([variable])
            assert average.average(variable)
            assert variable


def test_a_reference_that_programs_read_acts_as_without_a_strategy() -> None:
    def updated_and_gradient(opened: tf.compat.v1.Session) -> list[Any]:
        with reference_variables(), opened as run:
            variable = tf.compat.v1.get_variable("weight", initializer=[1.0, 2.0])
            read = tf.identity(variable._ref())
            (gradient,) = tf.gradients(tf.reduce_sum(read**2), [variable])
            run.run(tf.compat.v1.global_variables_initializer())
            run.run(variable.assign([3.0, 5.0]))
            return [type(variable).__name__, *(x.tolist() for x in run.run([read, gradient]))]

    with tf.Graph().as_default():
        kind, *stock = updated_and_gradient(tf.compat.v1.Session())
    assert (kind, stock) == ("RefVariable", [[3.0, 5.0], [6.0, 10.0]])
    strategy = estimator_ext.HostOffloadStrategy()
    with tf.Graph().as_default(), strategy.scope():
        assert updated_and_gradient(session(strategy))[1:] == stock


def test_input_fns_get_their_context(tmp_path: Path) -> None:
    observed = []

    def input_fn(input_context: tf.distribute.InputContext) -> tf.data.Dataset:
        observed.append(
            (
                input_context.num_input_pipelines,
                input_context.input_pipeline_id,
                input_context.num_replicas_in_sync,
            )
        )
        return tf.data.Dataset.from_tensors([1.0])

    def model_fn(features: tf.Tensor, mode: str) -> Any:
        return tf.estimator.EstimatorSpec(mode, loss=tf.reduce_sum(features))

    estimator_ext.Estimator(model_fn, str(tmp_path)).evaluate(input_fn)
    assert observed == [(1, 0, 1)]


def gradients_of(rank: int) -> dict[str, Any]:
    """Returns five gradients of one shape, two of them sparse, in a different order per rank."""
    values = np.random.RandomState(rank).standard_normal((5, 3, 4))
    names = ["a", "b", "c", "d", "e"]
    result = {n: tf.constant(v) for n, v in zip(names[:3], values)}
    for name, value in zip(names[3:], values[3:]):
        result[name] = tf.IndexedSlices(tf.constant(value), tf.constant([0, 1, 2]), [3, 4])
    order = names if rank == 0 else ["e", "c", "a", "d", "b"]
    return {name: result[name] for name in order}


@pytest.mark.parametrize("communication", ["grpc", "shm"])
def test_gradients_in_a_different_order_per_rank_are_summed_by_name(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch, communication: str
) -> None:
    monkeypatch.setenv("HOSTOPT_COMMUNICATION", communication)
    monkeypatch.setenv("HOSTOPT_BUCKET_MB", str(128 / 2**20))  # one gradient in each bucket

    def work(strategy: Any) -> Any:
        with strategy.scope():
            named = gradients_of(strategy.communicator.rank)
            variables = {
                name: tf.compat.v1.get_variable(name, [3, 4], tf.float64) for name in "abcde"
            }
            pairs = [(gradient, variables[name]) for name, gradient in named.items()]
            sums = strategy.run(lambda: estimator_ext.reduce_gradients(pairs))
            dense = {name: tf.convert_to_tensor(s) for name, (s, _) in zip(named, sums)}
        with session(strategy) as run:
            return run.run(dense)

    total = sum(np.random.RandomState(rank).standard_normal((5, 3, 4)) for rank in range(2))
    for result in as_ranks(addresses, work):
        for name, expected in zip("abcde", total):
            np.testing.assert_array_equal(result[name], expected, err_msg=name)


@pytest.mark.parametrize(
    ("left_out", "sparse", "named"),
    [
        ("b", "", "'b': rank 0 has [3, 4] float64, rank 1 has none"),
        ("", "b", "'b': rank 0 has [3, 4] float64, rank 1 has sparse rows of [4] float64"),
        ("d", "", "'d': rank 0 has sparse rows of [4] float64, int32 indices, rank 1 has none"),
        ("de", "", "'e': rank 0 has sparse rows of [4] float64, int32 indices, rank 1 has none"),
    ],
)
def test_ranks_with_different_gradients_are_refused(
    addresses: list[str], left_out: str, sparse: str, named: str
) -> None:
    def work(strategy: Any) -> Any:
        with strategy.scope():
            rank = strategy.communicator.rank
            result = gradients_of(rank)
            pairs = []
            for name, gradient in result.items():
                variable = tf.compat.v1.get_variable(name, initializer=np.zeros((3, 4)))
                if rank == 1 and name in sparse:
                    slices = tf.IndexedSlices(gradient, tf.constant([0, 1, 2]), [3, 4])
                    pairs.append((slices, variable))
                elif rank == 0 or name not in left_out:
                    pairs.append((gradient, variable))
            strategy.run(lambda: estimator_ext.reduce_gradients(pairs))

    with pytest.raises(hostopt.CollectiveMismatchError) as caught:
        as_ranks(addresses, work)
    assert named in str(caught.value)


@pytest.mark.parametrize("known", [True, False])
def test_sparse_gradients_of_a_variable_of_unknown_shape(
    addresses: list[str], known: bool
) -> None:
    def work(strategy: Any) -> Any:
        with strategy.scope():
            table = tf.Variable(np.zeros((3, 4)), shape=tf.TensorShape(None), name="table")
            shape = [None, 4] if known else [None, None]
            values = tf.compat.v1.placeholder_with_default(np.ones((2, 4)), shape)
            slices = tf.IndexedSlices(values, tf.constant([0, 2]), tf.constant([3, 4]))
            reduced = strategy.run(lambda: estimator_ext.reduce_gradients([(slices, table)]))
            with session(strategy) as opened:
                return opened.run(tf.convert_to_tensor(reduced[0][0]))

    if known:
        expected = [[2.0] * 4, [0.0] * 4, [2.0] * 4]
        np.testing.assert_array_equal(as_ranks(addresses, work), [expected] * 2)
    else:
        with pytest.raises(hostopt.ConfigError, match="gradient of 'table' is sparse"):
            as_ranks(addresses, work)


def test_a_graph_never_writes_into_the_sums_that_other_ranks_read(addresses: list[str]) -> None:
    """TensorFlow computes in place if it may; here other ranks still read the buffer."""
    changed = threading.Barrier(2)

    def work(strategy: Any) -> Any:
        rank = strategy.communicator.rank
        value = tf.compat.v1.placeholder(tf.float32, [1000])
        sums, reducer = reduce_in_buckets([value], ["v"], strategy.communicator)

        def look(array: Any) -> Any:
            changed.wait(30)  # the other rank has computed
            return np.array(array)

        if rank == 0:
            with tf.device("/device:CPU:0"):
                doubled = tf.nn.relu(-sums[0]) * 2.0 + 1.0  # each could take its input's memory
                result = tf.numpy_function(look, [doubled], tf.float32)
        else:
            result = tf.numpy_function(look, [sums[0]], tf.float32)
        with tf.compat.v1.Session() as session:
            actual = session.run(result, {value: np.full(1000, 3.0 + rank, np.float32)})
        reducer.close()
        return actual

    _, observed = as_ranks(addresses, work)
    np.testing.assert_array_equal(observed, np.full(1000, 7.0, np.float32))


# -- other launchers ----------------------------------------------------------------------------


@pytest.mark.parametrize("has_resolver", [True, False])
def test_a_resolver_without_a_cluster_asks_the_launcher(
    has_resolver: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = {"SM_HOSTS": '["127.0.0.1", "127.0.0.2"]', "SM_CURRENT_HOST": "127.0.0.2"}
    monkeypatch.setattr(os, "environ", {**os.environ, **hosts})
    given = tf.distribute.cluster_resolver.TFConfigClusterResolver() if has_resolver else None
    strategy = estimator_ext.HostOffloadStrategy(given)
    assert (strategy.cluster.rank, strategy.cluster.size) == (1, 2)
    if given is not None:
        assert (given.task_type, given.task_id) == ("worker", 0)


def test_a_tf_config_for_all_processes_contradicts_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {
        "cluster": {"worker": ["127.0.0.1:1", "127.0.0.2:1"]},
        "task": {"type": "worker", "index": 0},
    }
    hosts = {"SM_HOSTS": '["127.0.0.1", "127.0.0.2"]', "SM_CURRENT_HOST": "127.0.0.2"}
    variables = {**os.environ, **hosts, "TF_CONFIG": json.dumps(config)}
    monkeypatch.setattr(os, "environ", variables)
    with pytest.raises(hostopt.ConfigError, match="SageMaker has started this process as 1 of 2"):
        estimator_ext.HostOffloadStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
