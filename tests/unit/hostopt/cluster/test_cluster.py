"""Clusters from TF_CONFIG and cluster resolvers: ranks, roles and error messages."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest

from hostopt.cluster.cluster import Cluster
from hostopt.errors import ConfigError

A, B, C, D = (f"127.0.0.1:{port}" for port in (2221, 2222, 2223, 2224))


def read(cluster: Any = None, task: Any = None) -> Cluster:
    config = {"cluster": cluster, "task": task}
    return Cluster.from_tf_config(
        {"TF_CONFIG": json.dumps({k: v for k, v in config.items() if v is not None})}
    )


def task(type_: Any, index: Any = 0) -> dict[str, Any]:
    return {"type": type_, "index": index}


def resolver(jobs: Any, task_type: Any = None, task_id: Any = None) -> Any:
    """Creates the part of a `ClusterResolver` that hostopt uses."""
    spec = SimpleNamespace(as_dict=lambda: jobs) if jobs is not None else None
    return SimpleNamespace(cluster_spec=lambda: spec, task_type=task_type, task_id=task_id)


# --- what is right ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("me", "rank", "name"),
    [
        (task("chief"), 0, "chief:0"),
        (task("worker", 0), 1, "worker:0"),
        (task("worker", 1), 2, "worker:1"),
        (task("worker", "1"), 2, "worker:1"),  # TensorFlow takes numbers in quotes too
    ],
)
def test_the_chief_is_rank_0_and_the_workers_follow(
    me: dict[str, Any], rank: int, name: str
) -> None:
    cluster = read({"worker": [B, C], "chief": [A]}, me)
    assert [(member.name, member.address) for member in cluster.ring] == [
        ("chief:0", A),
        ("worker:0", B),
        ("worker:1", C),
    ]
    assert (cluster.rank, cluster.size, cluster.is_chief) == (rank, 3, rank == 0)
    assert cluster.role == me["type"]
    assert cluster.task is not None
    assert cluster.task.name == name
    assert str(cluster.task) == f"{name}, {[A, B, C][rank]}"
    assert cluster.describe(rank) == f"rank {rank} ({cluster.task})"
    attributes = {"rank": rank, "task": name, "address": [A, B, C][rank]}
    assert cluster.attributes(rank) == attributes


@pytest.mark.parametrize(("me", "rank"), [(task("master"), 0), (task("worker", 1), 2)])
def test_master_is_another_name_of_the_chief(me: dict[str, Any], rank: int) -> None:
    cluster = read({"worker": [B, C], "master": [A]}, me)
    assert [member.name for member in cluster.ring] == ["master:0", "worker:0", "worker:1"]
    assert (cluster.rank, cluster.size, cluster.is_chief) == (rank, 3, rank == 0)
    assert cluster.role == me["type"]
    result = Cluster.from_resolver(resolver({"master": [A], "worker": [B, C]}, **keywords(me)), {})
    assert result == cluster


def keywords(me: dict[str, Any]) -> dict[str, Any]:
    return {"task_type": me["type"], "task_id": me["index"]}


@pytest.mark.parametrize("index", [0, 1])
def test_without_a_chief_worker_0_is_rank_0(index: int) -> None:
    cluster = read({"worker": [A, B]}, task("worker", index))
    assert (cluster.rank, cluster.size, cluster.role) == (index, 2, "worker")
    assert cluster.is_chief == (index == 0)


def test_an_evaluator_is_not_in_the_ring() -> None:
    cluster = read({"chief": [A], "worker": [B]}, task("evaluator"))
    assert (cluster.rank, cluster.size, cluster.role) == (None, 2, "evaluator")
    assert not cluster.is_chief
    assert str(cluster.task) == "evaluator:0"


@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_evaluator_that_the_cluster_lists_is_not_in_the_ring_either(index: int) -> None:
    cluster = read({"chief": [A], "evaluator": [C, D]}, task("evaluator", index))
    assert (cluster.rank, cluster.size, cluster.role) == (None, 1, "evaluator")
    assert [evaluator.address for evaluator in cluster.evaluators] == [C, D]
    assert cluster.task is not None
    assert cluster.task.address == [C, D, ""][index]


@pytest.mark.parametrize("me", [task("data", 1), task("chief")])
def test_data_workers_are_not_in_the_ring(me: dict[str, Any]) -> None:
    cluster = read({"chief": [A], "worker": [B], "data": [C, D]}, me)
    assert (cluster.size, cluster.role) == (2, me["type"])
    assert cluster.rank == (0 if me["type"] == "chief" else None)
    assert [str(member) for member in cluster.data] == [f"data:0, {C}", f"data:1, {D}"]


def test_evaluators_have_a_separate_ring() -> None:
    jobs = {"chief": [A], "worker": [B], "evaluator": [C, D]}
    ring = read(jobs, task("evaluator", 1)).evaluator_ring()
    assert (ring.rank, ring.size, ring.role) == (1, 2, "evaluator")
    assert [str(member) for member in ring.ring] == [f"evaluator:0, {C}", f"evaluator:1, {D}"]


@pytest.mark.parametrize(
    ("evaluators", "index", "message"),
    [
        ([], 0, r'"evaluator" lists 0 addresses .*none of this task \(evaluator:0\)'),
        ([C], 1, r'"evaluator" lists 1 addresses .*none of this task \(evaluator:1\)'),
        ([C, C], 0, "more than once. Give every evaluator its own port"),
        ([A, C], 0, "more than once. Give every evaluator its own port"),
        ([D, C], 0, "more than once. Give every evaluator its own port"),
        (["no.such.host.invalid:1", C], 0, "does not resolve"),
    ],
)
def test_evaluators_that_cannot_reach_each_other(
    evaluators: list[str], index: int, message: str
) -> None:
    jobs = {"chief": [A], "evaluator": evaluators, "data": [D]}
    cluster = read(jobs, task("evaluator", index))
    with pytest.raises(ConfigError, match=message):
        cluster.evaluator_ring()


def test_only_evaluators_have_the_evaluator_ring() -> None:
    with pytest.raises(ConfigError, match=r"none of this task \(local\)"):
        Cluster.local().evaluator_ring()


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"TF_CONFIG": ""},
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": '{"cluster": {}}'},
        {"TF_CONFIG": '{"task": {"type": "worker", "index": 0}}'},
        {"TF_CONFIG": '{"model_dir": "/tmp/x"}'},
    ],
)
def test_without_a_cluster_there_is_a_single_rank(environ: dict[str, str]) -> None:
    for cluster in (Cluster.from_tf_config(environ), Cluster.from_resolver(None, environ)):
        assert cluster == Cluster.local()
        assert (cluster.rank, cluster.size, cluster.role) == (0, 1, "local")
        assert cluster.is_chief


def test_a_peer_whose_host_does_not_resolve_yet_is_accepted() -> None:
    cluster = read({"chief": [A], "worker": ["later.invalid:2222"]}, task("chief"))
    assert cluster.ring[1].address == "later.invalid:2222"


@pytest.mark.parametrize("address", ["localhost:2222", "[::1]:2222", "127.0.0.1:65535"])
def test_addresses(address: str) -> None:
    assert read({"chief": [address]}, task("chief")).ring[0].address == address


def test_tf_config_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"cluster": {"chief": [A], "worker": [B]}, "task": task("worker")}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert Cluster.from_tf_config().rank == 1
    assert Cluster.from_resolver(None).rank == 1


# --- what is wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("{'cluster': {}}", ["TF_CONFIG is not JSON", "{'cluster': {}}"]),
        ("{", ["TF_CONFIG is not JSON"]),
        ('["worker"]', ["TF_CONFIG", '["worker"]', "object"]),
        ("7", ["TF_CONFIG", "object"]),
        ("null", ["TF_CONFIG", "object"]),
    ],
)
def test_not_a_json_object(text: str, quoted: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Cluster.from_tf_config({"TF_CONFIG": text})
    for words in quoted:
        assert words in str(caught.value)


RING = {"chief": [A], "worker": [B, C]}
BAD = {
    "no task": (RING, None, ['"task"', "task type and task index must be set"]),
    "task no object": (RING, "worker", ['"task"', '"worker"']),
    "task without type": (RING, {"index": 0}, ['"task"', '"type"']),
    "task without index": (RING, {"type": "worker"}, ['"task"', '"index"']),
    "chief without cluster": (None, task("chief"), ['"cluster"', "chief"]),
    "chief with empty cluster": ({}, task("chief"), ['"cluster"', "chief"]),
    "evaluator without cluster": (None, task("evaluator"), ['"cluster"', "evaluator"]),
    "cluster no object": ([A, B], task("worker"), ['"cluster"', A]),
    "index too large": (
        RING,
        task("worker", 2),
        ['"index"', "2 is not a valid task_id", "0 to 1"],
    ),
    "index of chief": (RING, task("chief", 1), ['"index"', "1 is not a valid task_id"]),
    "index negative": (RING, task("worker", -1), ['"index"', "-1", "non-negative"]),
    "index a word": (RING, task("worker", "one"), ['"index"', "'one'", "number"]),
    "index null": (RING, task("worker", None), ['"index"', "None", "number"]),
    "index a list": (RING, task("worker", [0]), ['"index"', "[0]", "number"]),
    "negative evaluator": (RING, task("evaluator", -1), ['"index"', "-1"]),
    "two chiefs": ({"chief": [A, B]}, task("chief"), ['"chief"', A, B, "only one"]),
    "two masters": ({"master": [A, B]}, task("master"), ['"master"', A, B, "only one"]),
    "no master": ({"master": [], "worker": [A]}, task("worker"), ['"master"', "no address"]),
    "chief and master": (
        {"chief": [A], "master": [B]},
        task("chief"),
        ['"chief"', '"master"', "job `chief` is not supported"],
    ),
    "evaluator of a master": (
        {"master": [A], "evaluator": [B]},
        task("evaluator"),
        ['"task"', '"master"', "task_type `evaluator` is not supported", 'the master "chief"'],
    ),
    "nobody": ({"evaluator": [A]}, task("evaluator"), ['"cluster"', '"chief"', '"worker"']),
    "no addresses": ({"worker": []}, task("worker"), ['"cluster"', '"worker"']),
    "address twice": ({"chief": [A], "worker": [B, A]}, task("chief"), ['"cluster"', A]),
    "address twice in a job": ({"worker": [B, B]}, task("worker"), ['"cluster"', B]),
    "no port": ({"worker": ["host"]}, task("worker"), ['"worker"', "'host'", "host:port"]),
    "no host": ({"worker": [":2222"]}, task("worker"), ['"worker"', "':2222'"]),
    "port 0": ({"worker": ["host:0"]}, task("worker"), ['"worker"', "'host:0'", "65535"]),
    "port too large": ({"worker": ["host:65536"]}, task("worker"), ['"worker"', "'host:65536'"]),
    "port a word": ({"worker": ["host:http"]}, task("worker"), ['"worker"', "'host:http'"]),
    "address a number": ({"worker": [2222]}, task("worker"), ['"worker"', "2222"]),
    "address null": ({"worker": [None]}, task("worker"), ['"worker"', "None"]),
    "address of evaluator": (
        {"chief": [A], "evaluator": ["host"]},
        task("chief"),
        ['"evaluator"', "'host'"],
    ),
    "one address, no list": ({"worker": A}, task("worker"), ['"worker"', A, "list"]),
    "sparse": ({"worker": {"1": B}}, task("worker", 1), ['"worker"', "sparse"]),
    "parameter server": ({"chief": [A], "ps": [B]}, task("chief"), ['"cluster"', '"ps"']),
    "unknown job": ({"chief": [A], "wroker": [B]}, task("chief"), ['"cluster"', "'wroker'"]),
    "unknown task type": (RING, task("wroker"), ['"task"', "'wroker'"]),
    "ps task": (RING, task("ps"), ['"task"', "'ps'"]),
    "task type null": (RING, task(None), ['"task"', "None"]),
    "task of an absent job": ({"worker": [A]}, task("chief"), ['"task"', "chief", '"cluster"']),
    "own host unknown": (
        {"chief": [A], "worker": ["here.invalid:2222"]},
        task("worker"),
        ['"worker"', "worker:0", "here.invalid:2222", "does not resolve"],
    ),
    "own host misspelt": (
        {"chief": ["here..invalid:2222"]},
        task("chief"),
        ['"chief"', "chief:0", "here..invalid:2222", "does not resolve"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_quoted(case: str) -> None:
    cluster, me, quoted = BAD[case]
    with pytest.raises(ConfigError) as caught:
        read(cluster, me)
    for words in quoted:
        assert words in str(caught.value)


def test_the_error_of_an_unresolved_local_host_has_attributes() -> None:
    with pytest.raises(ConfigError) as caught:
        read({"worker": ["here.invalid:2222"]}, task("worker"))
    assert (caught.value.task, caught.value.address) == ("worker:0", "here.invalid:2222")


def test_the_environment_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", environ(RING, task("worker", 1)))
    assert Cluster.from_tf_config() == read(RING, task("worker", 1))
    assert Cluster.from_resolver(None) == read(RING, task("worker", 1))


# --- resolvers --------------------------------------------------------------------------------


def environ(cluster: Any, me: Any) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": me})}


def test_a_resolver_without_tf_config() -> None:
    cluster = Cluster.from_resolver(resolver(RING, "worker", 1), {})
    assert cluster == read(RING, task("worker", 1))


def test_a_resolver_that_agrees_with_tf_config() -> None:
    expected = read(RING, task("worker", 1))
    result = Cluster.from_resolver(resolver(RING, "worker", 1), environ(RING, task("worker", 1)))
    assert result == expected
    as_tuples = {job: tuple(addresses) for job, addresses in RING.items()}
    assert expected == Cluster.from_resolver(
        resolver(as_tuples, "worker", "1"), environ(RING, task("worker", 1))
    )


def test_a_resolver_without_a_task_uses_the_task_of_tf_config() -> None:
    result = Cluster.from_resolver(resolver(RING), environ(RING, task("worker", 1)))
    assert result == read(RING, task("worker", 1))


@pytest.mark.parametrize("jobs", [None, {}])
def test_a_resolver_without_a_cluster_uses_the_cluster_of_tf_config(jobs: Any) -> None:
    assert Cluster.from_resolver(resolver(jobs), {}) == Cluster.local()
    result = Cluster.from_resolver(resolver(jobs), environ(RING, task("chief")))
    assert result == read(RING, task("chief"))


def test_a_resolver_of_an_evaluator() -> None:
    result = Cluster.from_resolver(
        resolver(RING, "evaluator", 0), environ(RING, task("evaluator"))
    )
    assert (result.role, result.rank) == ("evaluator", None)


@pytest.mark.parametrize(
    ("jobs", "type_", "index"),
    [
        (RING, "worker", 0),
        (RING, "chief", 0),
        ({"chief": [A], "worker": [B, D]}, "worker", 1),
        ({"chief": [A], "worker": [C, B]}, "worker", 1),
        ({"worker": [A, B, C]}, "worker", 1),
        ({"chief": [A], "worker": [B, D]}, None, None),
    ],
)
def test_a_resolver_that_contradicts_tf_config(jobs: Any, type_: Any, index: Any) -> None:
    with pytest.raises(ConfigError, match=r"resolver.*TF_CONFIG") as caught:
        Cluster.from_resolver(resolver(jobs, type_, index), environ(RING, task("worker", 1)))
    for addresses in (*jobs.values(), *RING.values()):
        assert all(address in str(caught.value) for address in addresses)


@pytest.mark.parametrize(
    ("jobs", "type_", "index", "quoted"),
    [
        (RING, None, None, "type None"),
        (RING, "worker", None, '"index"'),
        (RING, "worker", 5, "5 is not a valid task_id"),
        ({"chief": [A], "ps": [B]}, "chief", 0, '"ps"'),
        ({"worker": {1: B}}, "worker", 1, "sparse"),
    ],
)
def test_a_resolver_with_a_mistake(jobs: Any, type_: Any, index: Any, quoted: str) -> None:
    with pytest.raises(ConfigError, match=quoted):
        Cluster.from_resolver(resolver(jobs, type_, index), {})
