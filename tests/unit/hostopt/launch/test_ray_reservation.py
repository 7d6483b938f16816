"""Actors that hold places: those that come late, are lost, or never come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fake_ray import FakeRay, FakeRayError, FakeSetupError
from harness import until

from hostopt.errors import ConfigError, ResourceError
from hostopt.launch import ray_engine
from hostopt.launch.engine import Place
from hostopt.launch.ray_engine import Bundles, RayReservation
from hostopt.launch.ray_task import Opened
from hostopt.versions import VERSION


class Actor:
    """An actor that holds no port."""

    def __init__(self, version: str = VERSION) -> None:
        self._version = version

    def open(self) -> Opened:
        return Opened("host:1", "host (0)", self._version)


class Reservation:
    """A reservation of slots of two nodes.

    Args:
      ray: the fake package.
      least: smallest number of places.
      missing_s: times at which slots were first missed.
    """

    def __init__(self, ray: FakeRay, least: int, missing_s: dict[int, float]) -> None:
        bundles = Bundles(ray, [{"CPU": 2.0}] * 2, [])
        bundles.reserve(0.01, may_be_fewer=True)
        self.reservation = RayReservation(ray, bundles, [0, 1], least, 0.05, missing_s)

    def places(self) -> list[Place]:
        """Polls until there are places."""
        result: list[Sequence[Place]] = []

        def poll() -> bool:
            places = self.reservation.poll()
            result.extend([] if places is None else [places])
            return bool(result)

        until(poll, "places")
        return list(result[0])


@pytest.fixture
def ray() -> FakeRay:
    ray = FakeRay({0: "a", 1: "b"})
    ray.new_actor = Actor
    return ray


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "_RETRY_S", 0.01)


def test_places_of_all_slots(ray: FakeRay) -> None:
    reservation = Reservation(ray, 2, {})
    places = reservation.places()
    assert [(place.slot, place.address, place.node) for place in places] == [
        (slot, "host:1", "host (0)") for slot in range(2)
    ]
    assert [place.threads for place in places] == [2, 2]
    reservation.reservation.close()
    assert all(handle.is_killed for handle in ray.handles)


def test_an_actor_that_is_lost_while_it_starts_is_replaced(ray: FakeRay) -> None:
    ray.errors = [FakeRayError("its node died"), FakeRayError("the next one, too")]
    assert len(Reservation(ray, 2, {}).places()) == 2
    assert len(ray.handles) == 4


def test_a_place_that_is_lost_is_replaced_at_the_next_attempt(ray: FakeRay) -> None:
    reservation = Reservation(ray, 2, {})
    first = reservation.places()
    first[1].lost.set()
    second = reservation.places()
    assert second[0] is first[0] and second[1] is not first[1]
    assert [handle.is_killed for handle in ray.handles] == [False, True, False]


def test_fewer_places_than_slots(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "_START_S", 0.01)
    ray.errors = [None, *[FakeRayError("died")] * 1000]
    missing_s: dict[int, float] = {}
    assert [place.slot for place in Reservation(ray, 1, missing_s).places()] == [0]
    assert list(missing_s) == [1]
    ray.errors = []
    assert [place.slot for place in Reservation(ray, 1, missing_s).places()] == [0, 1]
    assert missing_s == {}


def test_too_few_places_are_an_error(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "_START_S", 0.01)
    ray.errors = [None, *[FakeRayError("died")] * 1000]
    with pytest.raises(ResourceError, match="there are 1 places, and at least 2 are needed"):
        Reservation(ray, 2, {}).places()


@pytest.mark.parametrize(
    "error",
    [
        FakeRayError("an error raised in its creation task: ModuleNotFoundError: hostopt"),
        FakeSetupError("pip failed"),
    ],
)
def test_a_node_that_cannot_run_hostopt(ray: FakeRay, error: FakeRayError) -> None:
    ray.errors = [error]
    with pytest.raises(ConfigError, match="a node cannot run hostopt: "):
        Reservation(ray, 2, {}).places()


def test_a_node_with_another_version(ray: FakeRay) -> None:
    ray.new_actor = lambda: Actor("0.0.1")
    with pytest.raises(ConfigError, match=r"node host \(0\) has hostopt 0.0.1, and the launcher"):
        Reservation(ray, 2, {}).places()
