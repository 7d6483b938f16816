"""The ring of this process, for programs that join it with `init()`, as programs for Horovod do.

For TensorFlow, each rank of such a program is a single process. So TF_CONFIG is hidden from
TensorFlow while the ring is open. Otherwise `tf.estimator.Estimator` would start servers at these
addresses and wait for them.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Hashable
from typing import Any

from hostopt.by_name.named import NamedCollectives
from hostopt.cluster import tf_config
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.hosts import Hosts, group_by_host, local_host_id
from hostopt.connect import connect
from hostopt.errors import ConfigError
from hostopt.process.child_process import call_at_exit

_lock = threading.RLock()
_joined: list[ProcessRing] = []  # the ring, if there is one
at_first_join: list[Callable[[], object]] = []  # called when this process joins its first ring


class ProcessRing:
    """The ring that this process has joined."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.named = NamedCollectives(communicator)
        ids = self.named.all_gather_bytes(local_host_id().encode(), "the hosts of the ranks")
        self.hosts: Hosts = group_by_host([each.decode() for each in ids])
        self.rank, self.size = communicator.rank, communicator.size
        self.local_ranks = self.hosts.members(self.rank)  # on the host of this rank
        self._kept: dict[Hashable, Any] = {}

    def keep(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns the object of a key, made at first use and closed with the ring."""
        with _lock:
            if key not in self._kept:
                self._kept[key] = make()
            return self._kept[key]

    def close(self) -> None:
        """Closes the kept objects, and leaves the ring."""
        self.named.close()
        try:
            for each in self._kept.values():
                if hasattr(each, "close"):
                    each.close()
        finally:
            self._kept.clear()
            self.communicator.close()


def init(only_once: bool = False) -> ProcessRing:
    """Joins the ring that TF_CONFIG describes, and returns it; without TF_CONFIG it has one rank.

    Does not join again, or raises an error if it must be called `only_once`. Collective: all ranks
    must call it.
    """
    with _lock:
        if _joined:
            if only_once:
                raise ConfigError(
                    "init() was called twice. Call it once, at the start of the program"
                )
            return _joined[0]
        communicator = connect()
        try:
            _joined.append(ProcessRing(communicator))
        except BaseException as error:
            communicator.abort(error)
            communicator.close()
            raise
        tf_config.hide()
        _begin()
        return _joined[0]


def shutdown() -> None:
    """Leaves the ring, and makes TF_CONFIG visible again. `init` may be called anew.

    Does nothing without a ring.
    """
    with _lock:
        if _joined:
            _joined.pop().close()
            tf_config.show()


def is_initialized() -> bool:
    """Returns True between `init` and `shutdown`."""
    return bool(_joined)


def current() -> ProcessRing:
    """Returns the ring of this process."""
    if not _joined:
        raise ConfigError("hostopt is not initialized. Call init() first")
    return _joined[0]


@functools.cache
def _begin() -> None:
    call_at_exit(shutdown)
    for function in at_first_join:
        function()


os.register_at_fork(after_in_child=_joined.clear)  # the ring is the parent's
