"""Ranks as threads of one process, for tests and experiments without sockets."""

from __future__ import annotations

from collections.abc import Sequence

from hostopt.cluster.cluster import Cluster, Task
from hostopt.cluster.tf_config import WORKER
from hostopt.errors import HostOptError
from hostopt.options import Options
from hostopt.transport.base import Transport
from hostopt.transport.message import Payload, Tag
from hostopt.transport.stall import Status


class InprocTransport(Transport):
    """One rank of a ring of threads; `connect` creates all of them, and the list of `peers`."""

    def __init__(self, cluster: Cluster, options: Options, peers: list[InprocTransport]) -> None:
        super().__init__(cluster, options)
        self._peers = peers

    @classmethod
    def connect(cls, size: int, options: Options | None = None) -> list[InprocTransport]:
        """Creates a ring; returns its transports in rank order."""
        ring = tuple(Task(WORKER, index, f"inproc:{index}") for index in range(size))
        peers: list[InprocTransport] = []
        peers.extend(cls(Cluster(task, ring), options or Options(), peers) for task in ring)
        return peers

    async def send(
        self, peer: int, tag: Tag, payload: Payload, name: str = "", lazily: bool = False
    ) -> None:
        """See `Transport.send`."""
        if self.error is not None:
            raise self.error
        self._count(len(payload))
        self._peers[peer].mailbox.put(self.rank, tag, memoryview(bytes(payload)))

    async def request_status(self, peer: int, waiting: int, tag: Sequence[int]) -> Status | None:
        """See `Transport.request_status`."""
        return self._peers[peer].status_for(waiting, tag)

    def _abort(self, error: HostOptError) -> None:
        for peer in self._peers:
            peer.mailbox.fail(error)

    def close(self) -> None:
        """See `Transport.close`."""
        for peer in self._peers:
            if self.error is None:
                peer.mailbox.mark_left(self.rank)
            else:  # the sender of the error may not have reached this peer yet
                peer.mailbox.fail(self.error)
        self._wait_for_dump()
