"""A cluster of Ray on this machine, whose nodes come and go."""

from __future__ import annotations

from typing import Any

from harness import until
from ray.cluster_utils import Cluster

QUICK_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}
STORE_BYTES = 80 << 20  # of the object store of a node


class Nodes:
    """A head without processor cores, and nodes with one or more cores each."""

    def __init__(self) -> None:
        head = {
            "num_cpus": 0,
            "object_store_memory": STORE_BYTES,
            "include_dashboard": False,
            "_system_config": QUICK_CHECKS,
        }
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: list[Any] = []

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def options(self) -> tuple[str, ...]:
        """Arguments of `hostopt run`."""
        return ("--on", "ray", "--address", self.address)

    def have(self, count: int) -> None:
        """Starts or ends nodes until there are `count` besides the head."""
        for node in list(self.nodes):
            if node.all_processes["raylet"][0].process.poll() is not None:  # killed by a task
                self.remove(node)
        while len(self.nodes) < count:
            self.add()
        while len(self.nodes) > count:
            self.remove(self.nodes[-1])

    def add(self, num_cpus: int = 1, num_gpus: int = 0) -> Any:
        """Starts a node, and waits until the cluster knows it."""
        self.nodes.append(
            self._cluster.add_node(
                num_cpus=num_cpus, num_gpus=num_gpus, object_store_memory=STORE_BYTES
            )
        )
        return self.nodes[-1]

    def remove(self, node: Any) -> None:
        """Kills all processes of a node, and waits until the cluster knows it."""
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)
        until(lambda: self._alive() == len(self.nodes) + 1, "end of a node", 60.0)

    def _alive(self) -> int:
        return sum(node["Alive"] for node in self._cluster.global_state.node_table())

    def close(self) -> None:
        self._cluster.shutdown()
