"""Ray without processes: actors are objects whose methods run in threads."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class FakeRayError(Exception):
    """Base class of Ray's errors."""


class FakeUnavailableError(FakeRayError):
    """The actor does not answer, and may come back."""


class FakeSetupError(FakeRayError):
    """The environment of an actor cannot be made."""


class FakeHandle:
    """The handle of an actor."""

    def __init__(self, actor: object) -> None:
        self.error: FakeRayError | None = None  # of all further calls
        self.lost_answers = 0  # number of next calls whose answers are lost
        self.is_killed = False
        self._actor = actor
        self._pool = concurrent.futures.ThreadPoolExecutor(8)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return SimpleNamespace(
            remote=lambda *arguments: self._pool.submit(self._call, method, arguments)
        )

    def _call(self, method: Callable[..., object], arguments: tuple[object, ...]) -> object:
        if self.error is not None:
            raise self.error
        result = method(*arguments)
        if method.__name__ == "events" and self.lost_answers:
            self.lost_answers -= 1
            raise FakeUnavailableError("no answer")
        return result


class FakeRay:
    """The functions of Ray that the launcher uses; each bundle of a group has a node."""

    exceptions = SimpleNamespace(
        RayError=FakeRayError,
        ActorUnavailableError=FakeUnavailableError,
        RuntimeEnvSetupError=FakeSetupError,
    )

    def __init__(self, nodes: dict[int, str] | None = None) -> None:
        self.placed = nodes or {}
        self.groups: list[SimpleNamespace] = []
        self.handles: list[FakeHandle] = []  # of all actors
        self.errors: list[FakeRayError | None] = []  # of the next actors
        self.new_actor: Callable[[], object] = object
        self.util = SimpleNamespace(
            placement_group=self._placement_group,
            placement_group_table=self._table,
            remove_placement_group=self.groups.remove,
            scheduling_strategies=SimpleNamespace(
                PlacementGroupSchedulingStrategy=lambda group, index: (group, index)
            ),
        )

    def remote(self, kind: type) -> Any:
        del kind
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._create))

    def _create(self) -> FakeHandle:
        self.handles.append(FakeHandle(self.new_actor()))
        self.handles[-1].error = self.errors.pop(0) if self.errors else None
        return self.handles[-1]

    @staticmethod
    def wait(calls: list[concurrent.futures.Future[Any]], timeout: float) -> tuple[Any, Any]:
        done, rest = concurrent.futures.wait(calls, timeout)
        return list(done), list(rest)

    @staticmethod
    def get(call: concurrent.futures.Future[Any]) -> Any:
        return call.result()

    @staticmethod
    def kill(handle: FakeHandle) -> None:
        handle.is_killed = True
        handle.error = FakeRayError("killed")

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 3.0}

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": True}, {"Alive": True}, {"Alive": False}]

    def _placement_group(self, bundles: list[dict[str, float]], strategy: str) -> object:
        assert strategy == "PACK"
        self.groups.append(SimpleNamespace(bundle_specs=bundles))
        return self.groups[-1]

    def _table(self, group: SimpleNamespace) -> dict[str, Any]:
        count = len(group.bundle_specs)
        nodes = {index: self.placed.get(index, "") for index in range(count)}
        return {
            "state": "CREATED" if all(nodes.values()) else "PENDING",
            "bundles_to_node_id": nodes,
        }
