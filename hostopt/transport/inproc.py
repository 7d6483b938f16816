"""Ranks as threads of one process: for tests, and to try an algorithm without sockets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hostopt.cluster import WORKER, Cluster, Task
from hostopt.errors import HostOptError, PeerLostError
from hostopt.options import Options
from hostopt.transport.base import Payload, Tag, Transport
from hostopt.transport.stall import status_of

__all__: list[str] = []


class InprocTransport(Transport):
    """One rank of a ring of threads; `connect` makes all of them.

    Args:
      cluster: the ring and this rank's place in it.
      options: deadlines and sizes.
      peers: list that holds the transports of all ranks, by rank, once all are made.
    """

    def __init__(self, cluster: Cluster, options: Options, peers: list[InprocTransport]) -> None:
        super().__init__(cluster, options)
        self._peers = peers

    @classmethod
    def connect(cls, size: int, options: Options | None = None) -> list[InprocTransport]:
        """Make a ring.

        Args:
          size: number of ranks.
          options: deadlines and sizes, the same for all.

        Returns:
          The transports, in rank order.
        """
        ring = tuple(Task(WORKER, index, f"inproc:{index}") for index in range(size))
        peers: list[InprocTransport] = []
        peers.extend(cls(Cluster(task, ring), options or Options(), peers) for task in ring)
        return peers

    async def send(self, peer: int, tag: Tag, payload: Payload, what: str = "") -> None:
        """See `Transport.send`."""
        if self.error is not None:
            raise self.error
        self._count(len(payload), 0)
        self._peers[peer].mailbox.put(self.rank, tag, memoryview(bytes(payload)))

    async def ask(self, peer: int, waiting: int, tag: Sequence[int]) -> dict[str, Any] | None:
        """See `Transport.ask`."""
        asked = self._peers[peer]
        sent, call = asked.recorder.has_sent(waiting, tag), asked.call_on(tag[0])
        return {**status_of(asked), "sent": sent, "call": call}

    def abort(self, error: BaseException) -> None:
        """See `Transport.abort`."""
        if not isinstance(error, HostOptError):
            cause = f"{type(error).__name__}: {error}"
            error = PeerLostError(
                f"rank {self.rank} stopped: {cause}", rank=self.rank, root_cause=cause
            )
        for peer in self._peers:
            peer.mailbox.fail(error)

    def close(self) -> None:
        """See `Transport.close`."""
        for peer in self._peers:
            if self.error is None:
                peer.mailbox.leave(self.rank, "it has closed its communicator")
            else:  # who told this rank may not have told that one yet
                peer.mailbox.fail(self.error)
        self._finish_record()
