"""hostopt: collectives between training processes, with the buffers in host memory."""

from __future__ import annotations

from hostopt.cluster.cluster import Cluster, Task
from hostopt.collectives.communicator import Communicator
from hostopt.collectives.reduce_op import ReduceOp
from hostopt.connect import connect
from hostopt.errors import (
    AuthError,
    CheckpointError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ConfigError,
    HostOptError,
    NonFiniteGradientError,
    PeerLostError,
    ProtocolError,
    RendezvousTimeoutError,
    ResourceError,
    RetryableError,
)
from hostopt.options import Options
from hostopt.versions import VERSION

__version__ = VERSION

__all__ = [
    "connect",
    "Cluster",
    "Communicator",
    "Options",
    "ReduceOp",
    "Task",
    "HostOptError",
    "AuthError",
    "CheckpointError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ConfigError",
    "NonFiniteGradientError",
    "PeerLostError",
    "ProtocolError",
    "RendezvousTimeoutError",
    "ResourceError",
    "RetryableError",
]
