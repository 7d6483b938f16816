"""Bundles of a cluster of Ray."""

from __future__ import annotations

import logging

import pytest
from fake_ray import FakeRay

from hostopt.errors import ResourceError
from hostopt.launch import ray_engine
from hostopt.launch.ray_engine import Bundles

RANK, EVALUATOR = {"CPU": 2.0, "GPU": 1.0, "disk": 1.0}, {"CPU": 1.0}


def test_ranks_of_a_node_are_neighbours() -> None:
    ray = FakeRay({0: "b", 1: "a", 2: "b", 3: "a", 4: "b"})
    bundles = Bundles(ray, [RANK] * 4, [EVALUATOR])
    bundles.reserve(1.0, may_be_fewer=False)
    assert [bundles.node_of(slot) for slot in range(5)] == ["b", "b", "a", "a", "b"]
    (group,) = ray.groups
    assert group.bundle_specs == [RANK] * 4 + [EVALUATOR]
    assert bundles.options(1) == {
        "num_cpus": 2.0,
        "num_gpus": 1.0,
        "memory": None,
        "resources": {"disk": 1.0},
        "scheduling_strategy": (group, 2),
    }
    assert bundles.options(4)["scheduling_strategy"] == (group, 4)
    bundles.close()
    assert ray.groups == []


def test_too_little_room_is_an_error() -> None:
    bundles = Bundles(FakeRay({0: "a"}), [RANK] * 2, [EVALUATOR])
    with pytest.raises(ResourceError) as error:
        bundles.reserve(0.01, may_be_fewer=False)
    assert str(error.value) == (
        "the cluster has no room for 2 x CPU=2,GPU=1,disk=1, 1 x CPU=1 (2 nodes, with "
        "CPU=3,GPU=0,disk=0 free in total) within 0.01 s. Start more nodes, or ask for less"
    )


def test_with_less_room_each_bundle_waits_for_itself() -> None:
    ray = FakeRay({1: "a"})
    bundles = Bundles(ray, [EVALUATOR] * 2, [])
    bundles.reserve(0.01, may_be_fewer=True)
    assert [group.bundle_specs for group in ray.groups] == [[EVALUATOR]] * 2
    assert bundles.node_of(1) == ""
    ray.placed = {0: "a"}
    assert bundles.node_of(1) == "a"


def test_a_wait_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_engine, "_FIRST_LOG_S", 0.0)
    with caplog.at_level(logging.INFO):
        Bundles(FakeRay(), [EVALUATOR] * 2, []).reserve(0.3, may_be_fewer=True)
    assert caplog.messages == [
        "waiting for room for 2 x CPU=1 (2 nodes, with CPU=3 free in total)"
    ]
