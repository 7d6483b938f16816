"""Starts tasks on the nodes of a cluster of Ray: `hostopt run --on ray`.

Each slot has a bundle of resources for the whole run. An attempt creates an actor on each bundle,
which holds a port of its node and runs the task.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hostopt.errors import ConfigError, ResourceError
from hostopt.launch.engine import Place, Poll, Settings, TaskId
from hostopt.launch.ray_task import Job, Opened, RelayedSupervisor, TaskActor, describe
from hostopt.transport.addresses import host_and_port
from hostopt.versions import VERSION

_CPU = "CPU"
_LOG_S = 10.0  # between two lines while it waits for places
_FIRST_LOG_S = 1.0
_CONNECT_TIMEOUT_S = 10.0
_POLL_S = 0.1  # between two looks at resources that are not reserved yet
Resources = Mapping[str, float]
_START_S = 60.0  # for an actor to start on a node that has room
_RETRY_S = 1.0  # after an actor that could not start
_THREADS = 8  # of an actor: signals must not wait for a call that waits for events
_IN_CREATION = "error raised in its creation task"  # Ray's words
_JOIN_S = 2.0  # for a relay, before the connection to Ray is closed
_LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Connects this process to a cluster, and yields the package `ray`.

    Ray's handler of SIGTERM is removed. Ray prints the troubles of its nodes to `sys.stdout`, in
    a thread; they would mix with the output of the tasks, so they are dropped.
    """
    _check_address(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a call after the end starts no cluster
    try:
        ray: Any = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise ConfigError(
            f"--on ray needs Ray, which cannot be imported: {error}. Run `pip install "
            "'hostopt[ray]'` here and on all nodes"
        ) from error
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except (OSError, RuntimeError, ValueError) as error:
            raise _no_connection(address, error) from error
        finally:
            signal.signal(signal.SIGTERM, handler)
        try:
            yield ray
        finally:
            ray.shutdown()


def _check_address(address: str) -> None:
    """Raises ConfigError if nothing listens at an address; Ray would wait for minutes."""
    if "://" in address:
        raise ConfigError(
            f"{address!r} is an address for clients of Ray, which cannot hold the processes of a "
            "run. Pass HOST:PORT on a node of the cluster, or use `ray job submit`"
        )
    if address == "auto":
        return
    try:
        socket.create_connection(host_and_port(address), _CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _no_connection(address, error) from error


def _no_connection(address: str, error: Exception) -> ConfigError:
    text = " ".join(str(error).split()).rstrip(".")
    return ConfigError(
        f"no connection to a cluster of Ray at {address!r}: {text}. Start one with `ray start "
        "--head`, or pass the --address of one"
    )


class Bundles:
    """Resources of the nodes, a bundle for each slot.

    At first all bundles are one placement group, which Ray packs onto few nodes. If there is no
    room for all of them, each bundle becomes a group of its own, and those without a node wait for
    one. Ray moves a bundle whose node dies to another node as soon as one has room.
    """

    def __init__(
        self, ray: Any, ranks: Sequence[Resources], evaluators: Sequence[Resources]
    ) -> None:
        self.wanted = [*ranks, *evaluators]
        self._ray = ray
        self._size = len(ranks)
        self._groups: list[Any] = []
        self._bundles: list[tuple[Any, int]] = []  # group and index of each slot

    def reserve(self, timeout_s: float, may_be_fewer: bool) -> None:
        """Reserves the bundles, and logs every few seconds that it waits."""
        group = self._add_group(self.wanted)
        if self._wait_for(group, timeout_s):
            self._bundles = [(group, index) for index in self._by_node(group)]
        elif may_be_fewer:
            self.close()
            self._bundles = [(self._add_group([each]), 0) for each in self.wanted]
        else:
            raise ResourceError(
                f"the cluster has no room for {self.describe()} within {timeout_s:g} s. Start "
                "more nodes, or ask for less"
            )

    def _wait_for(self, group: Any, timeout_s: float) -> bool:
        """Returns True if a group has all its resources in time."""
        begin_s = time.monotonic()
        log_s = begin_s + _FIRST_LOG_S
        while self._ray.util.placement_group_table(group)["state"] != "CREATED":
            now_s = time.monotonic()
            if now_s - begin_s >= timeout_s:
                return False
            if now_s >= log_s:
                log_s = now_s + _LOG_S
                _LOG.info("waiting for room for %s", self.describe())
            time.sleep(_POLL_S)
        return True

    def close(self) -> None:
        """Frees the resources."""
        for group in self._groups:
            self._ray.util.remove_placement_group(group)
        self._groups = []

    def node_of(self, slot: int) -> str:
        """Returns the id of the node of a bundle; empty if it has none."""
        group, index = self._bundles[slot]
        return self._nodes(group)[index]

    def options(self, slot: int) -> dict[str, Any]:
        """Returns the options of an actor that uses the bundle of a slot."""
        group, index = self._bundles[slot]
        rest = dict(self.wanted[slot])
        strategies = self._ray.util.scheduling_strategies
        return {
            "num_cpus": rest.pop(_CPU, 0),
            "num_gpus": rest.pop("GPU", 0),
            "memory": rest.pop("memory", None),
            "resources": rest,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(group, index),
        }

    def name_of(self, slot: int) -> str:
        """Returns the name of a slot for logs."""
        is_rank = slot < self._size
        return f"slot {slot}" if is_rank else f"evaluator:{slot - self._size}"

    def describe(self) -> str:
        """Returns the wanted and the free resources, for logs and errors."""
        kinds = [_text_of(each) for each in self.wanted]
        wanted = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
        free = self._ray.available_resources()
        names = dict.fromkeys(name for each in self.wanted for name in each)
        left = _text_of({name: free.get(name, 0.0) for name in names})
        nodes = sum(node["Alive"] for node in self._ray.nodes())
        return f"{wanted} ({nodes} nodes, with {left} free in total)"

    def _add_group(self, bundles: Sequence[Resources]) -> Any:
        self._groups.append(
            self._ray.util.placement_group([dict(each) for each in bundles], strategy="PACK")
        )
        return self._groups[-1]

    def _by_node(self, group: Any) -> list[int]:
        """Returns the indices of the bundles, so that ranks of a node are neighbours."""
        nodes = self._nodes(group)
        first = {node: index for index, node in reversed(list(enumerate(nodes)))}
        ranks = sorted(range(self._size), key=lambda index: first[nodes[index]])
        return [*ranks, *range(self._size, len(self.wanted))]

    def _nodes(self, group: Any) -> list[str]:
        nodes = self._ray.util.placement_group_table(group)["bundles_to_node_id"]
        return [str(nodes.get(index) or "") for index in range(len(group.bundle_specs))]


def _text_of(resources: Resources) -> str:
    """Returns resources as a user writes them, such as "CPU=1,GPU=1"."""
    return ",".join(f"{name}={amount:g}" for name, amount in resources.items())


@dataclass(frozen=True)
class RayPlace(Place):
    """A place on a node."""

    actor: Any = None
    threads: int = 1
    lost: threading.Event = field(default_factory=threading.Event)


@dataclass
class RayReservation:
    """Actors for the slots of an attempt, on the bundles of the slots."""

    _ray: Any
    _bundles: Bundles
    _slots: Sequence[int]
    _least: int
    _timeout_s: float
    # Time at which each slot without a place was first missed, which outlives an attempt: no
    # attempt waits again for a slot that an earlier one has waited for in vain.
    _missing_s: dict[int, float]

    def __post_init__(self) -> None:
        self._actors: dict[int, tuple[Any, Any]] = {}  # each with the call that opens its place
        self._places: dict[int, RayPlace] = {}
        self._retry_s: dict[int, float] = {}  # when the next actor of a slot may be created
        self._begin_s = self._log_s = time.monotonic()

    def poll(self) -> Sequence[Place] | None:
        """Returns the places that are ready; None while it waits for others."""
        now_s = time.monotonic()
        for place in list(self._places.values()):
            if place.lost.is_set():
                self._drop(place.slot)
                self._begin_s = now_s
        for slot in self._slots:
            if slot not in self._actors and now_s >= self._retry_s.get(slot, now_s):
                self._create(slot)
            if slot in self._actors and slot not in self._places:
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
        actor = self._ray.remote(TaskActor).options(**options).remote()
        self._actors[slot] = actor, actor.open.remote()

    def _look(self, slot: int) -> None:
        """Makes a place of an actor that has started; drops one that could not."""
        actor, call = self._actors[slot]
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
        self._missing_s.pop(slot, None)
        threads = max(1, int(self._bundles.wanted[slot].get(_CPU, 1)))
        self._places[slot] = RayPlace(
            slot, opened.address, opened.node, actor=actor, threads=threads
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
        if now_s - self._log_s >= _LOG_S:
            self._log_s = now_s
            names = self._names(missing)
            if all(map(self._bundles.node_of, missing)):
                _LOG.info("waiting for Ray to start the processes of %s", names)
            else:
                _LOG.info("waiting for room for %s: %s", names, self._bundles.describe())

    def _names(self, slots: Sequence[int]) -> str:
        return ", ".join(map(self._bundles.name_of, slots))

    def _drop(self, slot: int) -> None:
        self._places.pop(slot, None)
        actor, _ = self._actors.pop(slot, (None, None))
        if actor is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)


class RayEngine:
    """Starts tasks on the nodes of a cluster of Ray."""

    def __init__(self, address: str, resources: Resources, timeout_s: float) -> None:
        self._address = address
        self._resources = resources
        self._timeout_s = timeout_s
        self._ray: Any = None
        self._bundles: Bundles | None = None
        self._missing_s: dict[int, float] = {}
        self._numbers = itertools.count(1)  # of tasks
        self._started: list[RelayedSupervisor] = []
        has_token = {"HOSTOPT_TOKEN", "HOSTOPT_TOKEN_FILE"} & os.environ.keys()
        # for this run; the commands alone have it in their environment
        self._token = {} if has_token else {"HOSTOPT_TOKEN": secrets.token_hex(32)}

    @contextlib.contextmanager
    def open(self, size: int, evaluators: int, min_size: int) -> Iterator[None]:
        """Connects to the cluster and reserves the resources of all tasks."""
        with _connected(self._address) as self._ray:
            helper = {_CPU: min(1.0, self._resources.get(_CPU, 1.0))}  # an evaluator sees no GPU
            bundles = Bundles(self._ray, [self._resources] * size, [helper] * evaluators)
            try:
                bundles.reserve(self._timeout_s, may_be_fewer=min_size < size)
                self._bundles = bundles
                yield
            finally:
                bundles.close()
                for supervisor in self._started:
                    supervisor.join(_JOIN_S)

    @contextlib.contextmanager
    def reserve(self, slots: Sequence[int], least: int) -> Iterator[Poll]:
        """Creates an actor for each slot, which holds a port of its node."""
        assert self._bundles is not None
        reservation = RayReservation(
            self._ray, self._bundles, slots, least, self._timeout_s, self._missing_s
        )
        with contextlib.closing(reservation):
            yield reservation.poll

    def start(
        self, place: Place, command: Sequence[str], task: TaskId, settings: Settings
    ) -> tuple[RelayedSupervisor, socket.socket]:
        """Starts a task through the actor of its place."""
        assert isinstance(place, RayPlace)
        job = Job(
            next(self._numbers),
            tuple(command),
            task,
            {**settings, **self._token},
            dict(os.environ),
            os.getcwd(),
            place.threads,
        )
        supervisor = RelayedSupervisor(self._ray, place.actor, place.node, job, place.lost.set)
        self._started.append(supervisor)
        return supervisor, supervisor.lifeline
