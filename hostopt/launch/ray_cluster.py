"""A cluster of Ray: the connection, and a bundle of its resources for each slot."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hostopt.errors import ConfigError, ResourceError

CPU = "CPU"
LOG_S = 10.0  # between two lines while it waits for places
_FIRST_LOG_S = 1.0
_CONNECT_TIMEOUT_S = 10.0
_POLL_S = 0.1  # between two looks at resources that are not reserved yet
Resources = Mapping[str, float]
_LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
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
        _init(ray, address)
        try:
            yield ray
        finally:
            ray.shutdown()


def _check_address(address: str) -> None:
    """Raises ConfigError if nothing listens at an address; Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address:
        raise ConfigError(
            f"{address!r} is an address for clients of Ray, which cannot hold the processes of a "
            "run. Pass HOST:PORT on a node of the cluster, or use `ray job submit`"
        )
    if address == "auto":
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _no_connection(address, error) from error


def _no_connection(address: str, error: Exception) -> ConfigError:
    text = " ".join(str(error).split()).rstrip(".")
    return ConfigError(
        f"no connection to a cluster of Ray at {address!r}: {text}. Start one with `ray start "
        "--head`, or pass the --address of one"
    )


def _init(ray: Any, address: str) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        raise _no_connection(address, error) from error
    finally:
        signal.signal(signal.SIGTERM, handler)


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
                log_s = now_s + LOG_S
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
            "num_cpus": rest.pop(CPU, 0),
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
        kinds = [text_of(each) for each in self.wanted]
        wanted = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
        free = self._ray.available_resources()
        names = dict.fromkeys(name for each in self.wanted for name in each)
        left = text_of({name: free.get(name, 0.0) for name in names})
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


def text_of(resources: Resources) -> str:
    """Returns resources as a user writes them, such as "CPU=1,GPU=1"."""
    return ",".join(f"{name}={amount:g}" for name, amount in resources.items())
