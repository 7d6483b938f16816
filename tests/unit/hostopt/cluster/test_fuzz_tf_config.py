"""TF_CONFIG of any structure gives a consistent cluster, or an error with advice."""

from __future__ import annotations

import copy
import json
import socket
from collections.abc import Iterator
from typing import Any, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structures import paths_in

from hostopt.cluster.cluster import Cluster
from hostopt.errors import ConfigError

JOBS = ["chief", "master", "worker", "evaluator", "ps", "Chief", "wroker", "", "worker\0"]
# Hosts that need no name server, and texts that are not hosts.
HOSTS = ["127.0.0.1", "localhost", "[::1]", "::1", "0.0.0.0", "256.1.1.1", "", " ", "a" * 300, "é"]
HOSTS += ["\0", "\ud800", "127.0.0.1:1", "http://127.0.0.1", "-", "[", "%s", "{}", "xn--", "."]
PORTS = ["2222", "0", "1", "65535", "65536", "-1", "٣", "²", "1e3", "", " 2222", "2222 ", "0x1"]
PORTS += ["9" * 5000, "+1", "1_0", "http"]
INDICES = [0, 1, 2, 3, -1, 10**30, 10**4299, 0.5, 1.0, "0", "1", " 1", "1_0", "٣", "x", "9" * 5000]
INDICES += [None, True, False, [], {}, float("nan"), float("inf"), -0.0]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from([*JOBS, *INDICES, "127.0.0.1:2222"]),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*JOBS, "cluster", "task", "type", "index"]), inner)
    ),
    max_leaves=6,
)
ADDRESSES = st.one_of(
    st.integers(2222, 2240).map("127.0.0.1:{}".format),
    st.builds("{}:{}".format, st.sampled_from(HOSTS), st.sampled_from(PORTS)),
    SCALARS,
)


def mostly(usual: st.SearchStrategy[Any], other: st.SearchStrategy[Any]) -> Any:
    """Generates the usual value in 7 of 8 cases."""
    return st.integers(0, 7).flatmap(lambda n: usual if n else other)


RIGHT = st.integers(2222, 65535).map("127.0.0.1:{}".format)
CLUSTERS = st.fixed_dictionaries(
    {},
    optional={
        "chief": mostly(st.lists(RIGHT, min_size=1, max_size=1), ANYTHING),
        "worker": mostly(st.lists(mostly(RIGHT, ADDRESSES), max_size=4), ANYTHING),
        "evaluator": mostly(st.lists(RIGHT, max_size=2), ANYTHING),
        "master": st.lists(ADDRESSES, max_size=2) | ANYTHING,
        "ps": st.lists(ADDRESSES, max_size=2) | ANYTHING,
    },
)
TASKS = st.fixed_dictionaries(
    {
        "type": mostly(st.sampled_from(JOBS[:4]), SCALARS | ANYTHING),
        "index": mostly(st.integers(0, 3), st.sampled_from(INDICES) | ANYTHING),
    },
    optional={"trial": ANYTHING},
)
CONFIGS = st.fixed_dictionaries(
    {"cluster": mostly(CLUSTERS, ANYTHING), "task": mostly(TASKS, ANYTHING)},
    optional={
        "environment": ANYTHING,
        "model_dir": SCALARS,
        "rpc_layer": SCALARS,
        "service": ANYTHING,
    },
)


@st.composite
def right(draw: Callable[[Any], Any]) -> Any:
    """Generates a valid configuration."""
    first = draw(st.sampled_from([None, "chief", "master"]))
    workers = draw(st.integers(0 if first else 1, 4))
    evaluators = 0 if first == "master" else draw(st.integers(0, 3))
    ports = draw(st.lists(st.integers(1, 65535), min_size=8, max_size=8, unique=True))
    addresses = [f"127.0.0.1:{port}" for port in ports]
    cluster = {first: addresses[:1]} if first else {}
    if workers or draw(st.booleans()):
        cluster["worker"] = addresses[1 : 1 + workers]
    if evaluators:
        cluster["evaluator"] = addresses[5 : 5 + evaluators]
    tasks = [(job, index) for job in cluster for index in range(len(cluster[job]))]
    job, index = draw(st.sampled_from(tasks))
    return {
        "cluster": cluster,
        "task": {"type": job, "index": draw(st.sampled_from([index, str(index)]))},
    }


@st.composite
def broken(draw: Callable[[Any], Any]) -> Any:
    """Generates a configuration in which one value is changed, missing or duplicated."""
    config = copy.deepcopy(draw(right() | CONFIGS))
    *path, last = draw(st.sampled_from(list(paths_in(config))))
    inner = config
    for key in path:
        inner = inner[key]
    how = draw(st.sampled_from(["replace", "remove", "wrap", "repeat"]))
    if how == "remove":
        del inner[last]
    elif how == "wrap":
        inner[last] = [inner[last]]
    elif how == "repeat" and isinstance(inner, list):
        inner.append(inner[last])
    else:
        inner[last] = draw(ANYTHING)
    return config


WORDS_OF_STOCK = ('If "service" is set in TF_CONFIG, it must be', "model_dir should be non-empty")
STRUCTURES = right() | broken() | CONFIGS | ANYTHING


def check_cluster(cluster: Cluster, config: Any) -> None:
    """Checks the invariants of a cluster, and that it equals the configuration."""
    if cluster.task is None:
        assert (cluster.ring, cluster.evaluators, cluster.role) == ((), (), "local")
        assert (cluster.rank, cluster.size, cluster.is_chief) == (0, 1, True)
        return
    task, jobs = cluster.task, config["cluster"]
    assert cluster.role == task.type == config["task"]["type"]
    assert task.index == int(config["task"]["index"]) >= 0
    named = [address for job in ("chief", "master", "worker") for address in jobs.get(job, [])]
    assert [member.address for member in cluster.ring] == named
    assert len(set(named)) == len(named) == cluster.size >= 1
    assert all(member.type in ("chief", "master") for member in cluster.ring[:-1]) or all(
        member.type == "worker" for member in cluster.ring[1:]
    )
    assert sum(member.type != "worker" for member in cluster.ring) <= 1
    assert [member.address for member in cluster.evaluators] == jobs.get("evaluator", [])
    assert not jobs.get("ps")
    if task.type == "evaluator":
        assert (cluster.rank, cluster.is_chief) == (None, False)
        assert (
            task.address == (jobs.get("evaluator", [""])[task.index : task.index + 1] or [""])[0]
        )
    else:
        assert cluster.rank is not None
        assert cluster.ring[cluster.rank] == task
        assert cluster.is_chief == (cluster.rank == 0)
    for address in (*named, *jobs.get("evaluator", [])):
        host, _, port = address.rpartition(":")
        assert host
        assert 0 < int(port) < 65536
    if cluster.evaluators:
        check_ring_of_evaluators(cluster)


def check_ring_of_evaluators(cluster: Cluster) -> None:
    try:
        ring = cluster.evaluator_ring()
    except ConfigError as error:
        check_message(error)
    else:
        assert ring.ring == cluster.evaluators
        assert ring.task == cluster.task
        assert ring.rank == cluster.evaluators.index(ring.task)


def check_message(error: ConfigError) -> None:
    """Checks that the message names the error and the remedy, and is printable."""
    text = str(error)
    assert "TF_CONFIG" in text
    assert len(text) < 2000
    assert ". " in text or ": " in text
    json.dumps(text)


@pytest.fixture(autouse=True, scope="module")
def no_name_server() -> Iterator[None]:
    """Resolves localhost only, without a name server."""
    find = socket.getaddrinfo

    def find_here(host: Any, *arguments: Any) -> Any:
        flags = 0 if host == "localhost" else socket.AI_NUMERICHOST
        return find(host, *arguments, flags=flags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", find_here)
        yield


def read(text: str, config: Any) -> None:
    try:
        cluster = Cluster.from_tf_config({"TF_CONFIG": text})
    except ConfigError as error:
        check_message(error)
    else:
        check_cluster(cluster, config)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"cluster": ' * 50_000,
        "1" * 5000,
        '{"task": {"type": "worker", "index": ' + "1" * 4300 + "}}",
        "\0",
        "\ud800",
        '{"cluster": {"worker": [' + ",".join(['"a:1"'] * 50_000) + "]}}",
        "{" + ",".join(f'"{n}": 1' for n in range(50_000)) + "}",
    ],
    ids=range(8),
)
def test_large_or_deep_texts(text: str) -> None:
    read(text, json.loads("{}"))


@given(right())
def test_a_valid_configuration_yields_a_cluster(config: Any) -> None:
    check_cluster(Cluster.from_tf_config({"TF_CONFIG": json.dumps(config)}), config)


@given(STRUCTURES)
def test_any_structure_yields_a_cluster_or_an_error(config: Any) -> None:
    read(json.dumps(config), config)


@given(STRUCTURES)
def test_a_run_config_of_any_structure(config: Any) -> None:
    """The stock RunConfig also reads TF_CONFIG, and must agree with the strategy."""
    import estimator_ext

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TF_CONFIG", json.dumps(config))
        try:
            strategy = estimator_ext.HostOffloadStrategy()
        except ConfigError as error:
            check_message(error)
            return
        try:
            result = estimator_ext.RunConfig(train_distribute=strategy)
        except (TypeError, ValueError) as error:
            assert str(error).startswith(WORDS_OF_STOCK)
            return
    cluster = strategy.cluster
    check_cluster(cluster, config)
    if cluster.task is not None:
        assert (result.task_type, result.task_id) == (cluster.task.type, cluster.task.index)
        assert result.num_worker_replicas == (0 if cluster.rank is None else cluster.size)
        assert result.global_id_in_cluster == cluster.rank
    assert result.is_chief == cluster.is_chief
