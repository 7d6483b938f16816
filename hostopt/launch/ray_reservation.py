"""Actors on the nodes of Ray that hold the places of an attempt."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hostopt.errors import ConfigError, ResourceError
from hostopt.launch.engine import Place
from hostopt.launch.ray_actor import Opened, TaskActor
from hostopt.launch.ray_cluster import CPU, LOG_S, Bundles
from hostopt.launch.ray_relay import describe
from hostopt.versions import VERSION

_START_S = 60.0  # for an actor to start on a node that has room
_RETRY_S = 1.0  # after an actor that could not start
_THREADS = 8  # of an actor: signals must not wait for a call that waits for events
_IN_CREATION = "error raised in its creation task"  # Ray's words
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RayPlace(Place):
    """A place on a node.

    Args:
      actor: handle of the actor that runs the task.
      threads: number of processor cores that are reserved for it.
      lost: set once the actor is lost.
    """

    actor: Any = None
    threads: int = 1
    lost: threading.Event = field(default_factory=threading.Event)


class RayReservation:
    """Actors for the slots of an attempt, on the bundles of the slots.

    Args:
      bundles: the bundles of all slots.
      slots: the slots that want a place.
      least: smallest number of places to be content with.
      timeout_s: longest time to wait for the place of a slot.
      missing_s: time at which each slot without a place was first missed, which outlives an
        attempt: no attempt waits again for a slot that an earlier one has waited for in vain.
    """

    def __init__(
        self,
        ray: Any,
        bundles: Bundles,
        slots: Sequence[int],
        least: int,
        timeout_s: float,
        missing_s: dict[int, float],
    ) -> None:
        self._ray = ray
        self._bundles = bundles
        self._slots = slots
        self._least = least
        self._timeout_s = timeout_s
        self._missing_s = missing_s
        self._actors: dict[int, Any] = {}
        self._opening: dict[int, Any] = {}  # calls that open the places
        self._places: dict[int, RayPlace] = {}
        self._retry_s: dict[int, float] = {}  # when the next actor of a slot may be created
        self._begin_s = self._log_s = time.monotonic()

    def poll(self) -> Sequence[Place] | None:
        """Returns the places that are ready; None while it waits for others.

        Raises:
          ConfigError: a node cannot run hostopt, or has another version of it.
          ResourceError: there are too few places.
        """
        now_s = time.monotonic()
        for place in list(self._places.values()):
            if place.lost.is_set():
                self._drop(place.slot)
                self._begin_s = now_s
        for slot in self._slots:
            if slot not in self._actors and now_s >= self._retry_s.get(slot, now_s):
                self._create(slot)
            if slot in self._opening:
                self._look(slot)
        missing = [slot for slot in self._slots if slot not in self._places]
        if any(self._waits_for(slot, now_s) for slot in missing):
            self._log_wait(missing, now_s)
            return None
        for slot in missing:
            self._drop(slot)
        if len(self._places) < self._least:
            raise ResourceError(
                f"there are {len(self._places)} places, and at least {self._least} are needed; "
                f"wanted in all: {self._bundles.describe()}. Start more nodes"
            )
        if missing:
            _LOG.warning(
                "going on with %d of %d places: there is no room for %s",
                *(len(self._places), len(self._slots), self._names(missing)),
            )
        return [self._places[slot] for slot in self._slots if slot in self._places]

    def close(self) -> None:
        """Ends the actors, and whatever they still run."""
        for slot in list(self._actors):
            self._drop(slot)

    def _create(self, slot: int) -> None:
        options = {"max_restarts": 0, "max_concurrency": _THREADS, **self._bundles.options(slot)}
        self._actors[slot] = self._ray.remote(TaskActor).options(**options).remote()
        self._opening[slot] = self._actors[slot].open.remote()

    def _look(self, slot: int) -> None:
        """Makes a place of an actor that has started; drops one that could not."""
        call = self._opening[slot]
        if not self._ray.wait([call], timeout=0)[0]:
            return
        try:
            opened: Opened = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            is_setup = isinstance(error, self._ray.exceptions.RuntimeEnvSetupError)
            if is_setup or _IN_CREATION in str(error):
                raise ConfigError(
                    f"a node cannot run hostopt: {describe(error)}. Install it on all nodes, and "
                    "correct the runtime_env of the job if it has one"
                ) from error
            _LOG.warning("slot %d lost its node while it started: %s", slot, describe(error))
            self._drop(slot)
            self._retry_s[slot] = time.monotonic() + _RETRY_S
            return
        if opened.version != VERSION:
            raise ConfigError(
                f"node {opened.node} has hostopt {opened.version}, and the launcher {VERSION}. "
                "Install the same version on all nodes"
            )
        del self._opening[slot]
        self._missing_s.pop(slot, None)
        threads = max(1, int(self._bundles.wanted[slot].get(CPU, 1)))
        self._places[slot] = RayPlace(
            slot, opened.address, opened.node, actor=self._actors[slot], threads=threads
        )

    def _waits_for(self, slot: int, now_s: float) -> bool:
        """Returns True if a slot may still get a place in time."""
        since_s = self._missing_s.setdefault(slot, now_s)
        if self._bundles.node_of(slot):  # its actor is starting
            return now_s - self._begin_s < max(_START_S, self._timeout_s)
        if len(self._places) < self._least:
            since_s = max(since_s, self._begin_s)
        return now_s - since_s < self._timeout_s

    def _log_wait(self, missing: Sequence[int], now_s: float) -> None:
        if now_s - self._log_s >= LOG_S:
            self._log_s = now_s
            names = self._names(missing)
            if all(map(self._bundles.node_of, missing)):
                _LOG.info("waiting for Ray to start the processes of %s", names)
            else:
                _LOG.info("waiting for room for %s: %s", names, self._bundles.describe())

    def _names(self, slots: Sequence[int]) -> str:
        return ", ".join(map(self._bundles.name_of, slots))

    def _drop(self, slot: int) -> None:
        self._opening.pop(slot, None)
        self._places.pop(slot, None)
        actor = self._actors.pop(slot, None)
        if actor is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)
